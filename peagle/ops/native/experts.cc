// See kernels.h, Experts.

#include <algorithm>

#include "kernels.h"
#include "linear.h"
#include "packed.h"
#include "parallel.h"
#include "scratch.h"
#include "vectors.h"

namespace peagle {
namespace {

struct Choice {
  int64_t row;  // index among the active rows
  float weight;
};

// The local experts that any row selected, in ascending order, each with its rows. Numbers count from the first local one.
struct Routing {
  int64_t *expert, *begin;  // expert i's choices are begin[i] .. begin[i + 1] - 1
  Choice* choices;
  int64_t count = 0, total = 0;
};

// Selects the top_k experts by logit, the highest first; of equal logits the lower index.
void Select(const float* logits, int64_t num_experts, int64_t top_k, int64_t* chosen) {
  int64_t count = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    if (count == top_k && !(logits[e] > logits[chosen[count - 1]])) continue;
    int64_t place = count < top_k ? count++ : count - 1;
    for (; place > 0 && logits[e] > logits[chosen[place - 1]]; --place) chosen[place] = chosen[place - 1];
    chosen[place] = e;
  }
}

Routing Route(const Experts& op, const ActiveRows& active, const float* all_logits, Scratch& scratch) {
  const int64_t total = active.count * op.top_k;
  int64_t *ids = scratch.Take<int64_t>(total), *load = scratch.Take<int64_t>(op.num_local + 1);
  float* weights = scratch.Take<float>(total);
  std::fill_n(load, op.num_local + 1, 0);
  for (int64_t row = 0; row < active.count; ++row) {
    const float* logits = all_logits + active.row[row] * op.num_experts;
    int64_t* chosen = ids + row * op.top_k;
    float* weight = weights + row * op.top_k;
    Select(logits, op.num_experts, op.top_k, chosen);
    float sum = 0;
    for (int64_t j = 0; j < op.top_k; ++j) {
      sum += weight[j] = Exp(Broadcast(logits[chosen[j]] - logits[chosen[0]]))[0];
    }
    for (int64_t j = 0; j < op.top_k; ++j) {
      weight[j] /= sum;
      const int64_t expert = chosen[j] - op.first;
      chosen[j] = expert >= 0 && expert < op.num_local ? expert : -1;
      if (chosen[j] >= 0) ++load[expert + 1];
    }
  }
  Routing routing{scratch.Take<int64_t>(op.num_local), scratch.Take<int64_t>(op.num_local + 1), scratch.Take<Choice>(total)};
  for (int64_t e = 0; e < op.num_local; ++e) {
    if (load[e + 1] > 0) {
      routing.begin[routing.count] = load[e];
      routing.expert[routing.count++] = e;
    }
    load[e + 1] += load[e];
  }
  routing.begin[routing.count] = routing.total = load[op.num_local];
  for (int64_t i = 0; i < total; ++i) {
    if (ids[i] >= 0) routing.choices[load[ids[i]]++] = {i / op.top_k, weights[i]};
  }
  return routing;
}

PEAGLE_INLINE Floats SwiGlu(Floats gate, Floats up, float limit) {
  const Floats most = Broadcast(limit);
  gate = gate > most ? most : gate;
  up = up > most ? most : up;
  up = up < -most ? -most : up;
  return gate * Sigmoid(1.702f * gate) * (up + 1.0f);
}

}  // namespace

void RunExperts(const Experts& op, Parallel& parallel) {
  const int64_t width = op.gate_up.inputs, hidden = op.down.inputs;
  const int64_t pairs = Panels(hidden), padded = pairs * kPanelRows, columns = Panels(width);
  Scratch scratch;
  const bool half = op.gate_up.bfloat16_rows;
  const ActiveRows active(op.x, half, op.norm, op.positions, op.rows, width, parallel, scratch);
  ClearInactive(op.positions, op.rows, width, op.out, op.bfloat16_out);
  float* const logits = scratch.Take<float>(op.rows * op.num_experts);
  Multiply<false>(op.router, active, op.router_bias, nullptr, logits, parallel);
  const Routing routing = Route(op, active, logits, scratch);
  const int64_t total = routing.total;
  const Inputs inputs(op.gate_up, active.x, active.count, parallel, scratch);
  // each choice's hidden values
  float* const activations = scratch.Take<float>(total * padded);

  auto of_expert = [&](const Matrix& matrix, int64_t panels, int64_t i) {
    Matrix one = matrix;
    const int64_t expert = routing.expert[i];
    one.panels = static_cast<const char*>(matrix.panels) + expert * panels * PanelBytes(matrix);
    if (matrix.scales != nullptr) one.scales = matrix.scales + expert * panels * (matrix.inputs / 32) * kPanelRows;
    return one;
  };

  const int64_t chosen = std::max<int64_t>(1, routing.count), rows_per_expert = (total + chosen - 1) / chosen;
  const int64_t up_work = Work(op.gate_up, 2 * pairs, rows_per_expert) * routing.count;
  const Cut up_cut(pairs, (Shares(up_work, parallel) + chosen - 1) / chosen);
  // whole pairs of panels: a chunk of n pairs is a tile of 2 n panels
  const int64_t pairs_per_chunk = std::min<int64_t>(up_cut.size, kTilePanels / 2);
  const int64_t up_chunks = (pairs + pairs_per_chunk - 1) / pairs_per_chunk;
  ForEach(parallel, routing.count * up_chunks, up_work, [&](int64_t chunk) {
    Tile tile;
    const int64_t i = chunk / up_chunks, first = chunk % up_chunks * pairs_per_chunk;
    const int64_t count = std::min(pairs_per_chunk, pairs - first);
    const Matrix matrix = of_expert(op.gate_up, 2 * pairs, i);
    const float* bias = op.gate_up_bias + routing.expert[i] * 2 * padded;
    for (int64_t choice = routing.begin[i]; choice < routing.begin[i + 1]; choice += RowsAtOnce(op.gate_up)) {
      const int64_t rows = std::min(RowsAtOnce(op.gate_up), routing.begin[i + 1] - choice);
      const void* x[kTileRows];
      for (int64_t t = 0; t < rows; ++t) x[t] = *inputs.From(routing.choices[choice + t].row);
      Dot(matrix, 2 * first, 2 * count, x, rows, tile);
      for (int64_t p = 0; p < count; ++p) {
        const float* gate_bias = bias + 2 * (first + p) * kPanelRows;
        const float* up_bias = gate_bias + kPanelRows;
        for (int64_t t = 0; t < rows; ++t) {
          float* activated = activations + (choice + t) * padded + (first + p) * kPanelRows;
          for (int64_t i = 0; i < kPanelRows; i += kLanes) {
            const Floats gate = Load<Floats>(tile.values[2 * p][t] + i) + Load<Floats>(gate_bias + i);
            const Floats up = Load<Floats>(tile.values[2 * p + 1][t] + i) + Load<Floats>(up_bias + i);
            const Floats values = SwiGlu(gate, up, op.limit);
            Store(activated + i, half ? Rounded(values) : values);
          }
        }
      }
    }
  });

  const float** const hidden_of = scratch.Take<const float*>(total);
  for (int64_t choice = 0; choice < total; ++choice) hidden_of[choice] = activations + choice * padded;
  const Inputs hidden_inputs(op.down, hidden_of, total, parallel, scratch);

  // each chunk computes some output columns of all rows, and adds the experts in ascending order, in floats
  float* const sums = op.bfloat16_out ? scratch.Take<float>(op.rows * width) : static_cast<float*>(op.out);
  const int64_t down_work = Work(op.down, columns, rows_per_expert) * routing.count;
  const Cut down_cut(columns, Shares(down_work, parallel));
  ForEach(parallel, down_cut.chunks, down_work, [&](int64_t chunk) {
    Tile tile;
    const int64_t first = down_cut.First(chunk), count = down_cut.Count(chunk);
    const int64_t left = first * kPanelRows, right = std::min(width, (first + count) * kPanelRows);
    for (int64_t i = 0; i < active.count; ++i) {
      const int64_t at = active.row[i] * width;
      if (!op.residual) {
        std::fill(sums + at + left, sums + at + right, 0.0f);
      } else if (half) {
        Widen(static_cast<const uint16_t*>(op.x) + at + left, right - left, sums + at + left);
      } else {
        std::copy_n(static_cast<const float*>(op.x) + at + left, right - left, sums + at + left);
      }
    }
    for (int64_t i = 0; i < routing.count; ++i) {
      const Matrix matrix = of_expert(op.down, columns, i);
      const float* bias = op.down_bias + routing.expert[i] * width;
      for (int64_t choice = routing.begin[i]; choice < routing.begin[i + 1]; choice += RowsAtOnce(op.down)) {
        const int64_t rows = std::min(RowsAtOnce(op.down), routing.begin[i + 1] - choice);
        Dot(matrix, first, count, hidden_inputs.From(choice), rows, tile);
        for (int64_t t = 0; t < rows; ++t) {
          const Choice& one = routing.choices[choice + t];
          float* out = sums + active.row[one.row] * width;
          for (int64_t p = 0; p < count; ++p) {
            for (int64_t j = 0; j < kPanelRows; j += kLanes) {
              const int64_t column = left + p * kPanelRows + j, kept = width - column;
              const Floats values = Load<Floats>(tile.values[p][t] + j) + LoadFirst(bias + column, kept);
              PutFirst<false>(out, column, MulAdd(values, one.weight, LoadFirst(out + column, kept)), kept);
            }
          }
        }
      }
    }
    for (int64_t i = 0; op.bfloat16_out && i < active.count; ++i) {
      const int64_t at = active.row[i] * width + left;
      Round(sums + at, right - left, static_cast<uint16_t*>(op.out) + at);
    }
  });
}

}  // namespace peagle
