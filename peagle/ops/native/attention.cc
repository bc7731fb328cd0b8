// See kernels.h, Attention and Rotation.

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "kernels.h"
#include "parallel.h"
#include "scratch.h"
#include "vectors.h"

namespace peagle {
namespace {

// Lane i = lane place(i) of a and b, concatenated.
template <class Place, int32_t... lane>
PEAGLE_INLINE Floats Pick(Floats a, Floats b, Place place, std::integer_sequence<int32_t, lane...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, place(lane)...);
#else
  return __builtin_shuffle(a, b, Ints{place(lane)...});
#endif
}

using EachLane = std::make_integer_sequence<int32_t, kLanes>;

// Of each 2 n lanes the first n of a, then the first n of b.
template <int n>
PEAGLE_INLINE Floats Firsts(Floats a, Floats b) {
  return Pick(a, b, [](int32_t lane) constexpr { return lane % (2 * n) < n ? lane : lane - n + int32_t{kLanes}; }, EachLane());
}

// Of each 2 n lanes the last n of a, then the last n of b.
template <int n>
PEAGLE_INLINE Floats Lasts(Floats a, Floats b) {
  return Pick(a, b, [](int32_t lane) constexpr { return lane % (2 * n) < n ? lane + n : lane + int32_t{kLanes}; }, EachLane());
}

// v[i] = the sums of neighbouring groups of n lanes in v[2 i] and v[2 i + 1]; repeats with larger groups.
template <int n>
PEAGLE_INLINE void AddNeighbours(Floats (&v)[kLanes]) {
#pragma GCC unroll 8
  for (int i = 0; i < kLanes / (2 * n); ++i) v[i] = Firsts<n>(v[2 * i], v[2 * i + 1]) + Lasts<n>(v[2 * i], v[2 * i + 1]);
  if constexpr (4 * n <= kLanes) AddNeighbours<2 * n>(v);
}

// Lane i = the sum over the lanes of parts[i], by rounds of adding neighbours.
PEAGLE_INLINE Floats SumEach(Floats (&parts)[kLanes]) {
  AddNeighbours<1>(parts);
  return parts[0];
}

// Transposes squares of 2 n lanes, then smaller ones.
template <int n = kLanes / 2>
PEAGLE_INLINE void Turn(Floats (&v)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & n) continue;
    const Floats a = v[i], b = v[i + n];
    v[i] = Firsts<n>(a, b);
    v[i + n] = Lasts<n>(a, b);
  }
  if constexpr (n > 1) Turn<n / 2>(v);
}

constexpr int64_t kStretch = 64;  // positions whose values are summed together

// Whether queries, keys, values and weights are multiplied as pairs of bfloat16: two inputs of a key, two positions' values.
#if defined(__AVX512BF16__)
template <bool kHalf>
constexpr bool kPairs = kHalf;
#else
template <bool kHalf>
constexpr bool kPairs = false;
#endif

// The inputs of a lane of keys.
template <bool kHalf>
constexpr int64_t kInputs = kPairs<kHalf> ? 2 : 1;

// Inputs of a key, kInputs to a lane.
template <bool kHalf>
PEAGLE_INLINE Floats LoadInputs(const void* base, int64_t index) {
  if constexpr (kPairs<kHalf>) return Load<Floats>(static_cast<const uint16_t*>(base) + index);
  return LoadLanes<kHalf>(base, index);
}

// sum + a * b, lane by lane
template <bool kHalf>
PEAGLE_INLINE Floats AddProducts(Floats a, Floats b, Floats sum) {
#if defined(__AVX512BF16__)
  if constexpr (kHalf) return AddPairs(a, b, sum);
#endif
  return MulAdd(a, b, sum);
}

// Offsets of neighbouring positions' vectors, from a multiple of kLanes on. A position that no query reads gets the
// offset of the nearest one that a query reads.
struct Places {
  int64_t at[kStretch];
};

// One query head of a row, and its intermediate results. All sums are in the order of positions, by tiles, so the result
// depends only on the position and on the keys and values that the query sees.
struct Query {
  int64_t oldest, newest;  // the positions it reads
  int64_t place;           // offset of its vector, and of its output
  const float* sink;       // or null
  const float* vector;     // [head_dim], or [head_dim / 2] pairs
  float* weights;          // of all positions of the tiles; as pairs they become bfloat16
  float* sums;             // [2][head_dim]: over values at even and at odd positions, or over every other pair
  float total;
};

PEAGLE_INLINE bool Overlaps(const Query& query, int64_t position) {
  return position <= query.newest && position + kLanes > query.oldest;
}

// The scores of a tile: dot products of a query with kLanes keys. Inputs are multiplied lane by lane, kLanes at a time, then
// the lanes are added pairwise. Finish adds the inputs after the last whole kLanes.

// kHead: the head's width if it is a constant, else 0
template <bool kHalf, int kHead>
PEAGLE_INLINE Floats Scores(const Query& query, const void* keys, const int64_t* at, int64_t width) {
  constexpr int64_t n = kInputs<kHalf>;
  const int64_t whole = (kHead > 0 ? kHead : width) / n / kLanes * kLanes;
  Floats parts[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    Floats part = {};
#pragma GCC unroll 4
    for (int64_t h = 0; h < whole; h += kLanes)
      part = AddProducts<kHalf>(Load<Floats>(query.vector + h), LoadInputs<kHalf>(keys, at[i] + n * h), part);
    parts[i] = part;
  }
  return SumEach(parts);
}

// Transposes a tile's keys to [head_dim / kInputs][kLanes], without the inputs after the last whole kLanes. Then a lane is a
// position, and several queries share the loads.
template <bool kHalf>
void TurnKeys(const void* keys, const int64_t* at, int64_t width, float* turned) {
  constexpr int64_t n = kInputs<kHalf>;
  for (int64_t h = 0; h + kLanes <= width / n; h += kLanes) {
    Floats rows[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = LoadInputs<kHalf>(keys, at[i] + n * h);
    Turn(rows);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) Store(turned + (h + i) * kLanes, rows[i]);
  }
}

// sums[q] = the contribution of inputs first .. first + count - 1 of every kLanes, added in the order of Scores
template <bool kHalf, int kQueries, int kFirst, int kCount, int kHead>
PEAGLE_INLINE void AddInputs(const float* const (&vectors)[kQueries], const float* turned, int64_t width,
                             Floats (&sums)[kQueries]) {
  if constexpr (kCount == 1) {
    const int64_t whole = (kHead > 0 ? kHead : width) / kInputs<kHalf> / kLanes * kLanes;
    for (int q = 0; q < kQueries; ++q) sums[q] = Floats{};
#pragma GCC unroll 4
    for (int64_t h = kFirst; h < whole; h += kLanes) {
      const Floats keys = Load<Floats>(turned + h * kLanes);
      for (int q = 0; q < kQueries; ++q) sums[q] = AddProducts<kHalf>(keys, Repeat(vectors[q] + h), sums[q]);
    }
  } else {
    Floats others[kQueries];
    AddInputs<kHalf, kQueries, kFirst, kCount / 2, kHead>(vectors, turned, width, sums);
    AddInputs<kHalf, kQueries, kFirst + kCount / 2, kCount / 2, kHead>(vectors, turned, width, others);
    for (int q = 0; q < kQueries; ++q) sums[q] += others[q];
  }
}

template <bool kHalf, int kQueries, int kHead>
__attribute__((noinline)) void ScoresTurned(const Query* queries, const float* turned, int64_t width,
                                            Floats (&scores)[kQueries]) {
  const float* vectors[kQueries];
  for (int q = 0; q < kQueries; ++q) vectors[q] = queries[q].vector;
  AddInputs<kHalf, kQueries, 0, kLanes, kHead>(vectors, turned, width, scores);
}

// Completes the scores: adds the inputs after the last whole kLanes, scales, and sets positions that the query does not read
// to -inf.
template <bool kHalf>
PEAGLE_INLINE Floats Finish(Floats scores, const Query& query, const void* keys, const int64_t* at, int64_t position,
                            int64_t width) {
  constexpr int64_t whole = kInputs<kHalf> * kLanes;
  for (int64_t h = width / whole * whole; h < width; ++h) {
    const float input = LoadOne<kPairs<kHalf>>(query.vector, h);
    for (int i = 0; i < kLanes; ++i) scores[i] = MulAdd(input, LoadOne<kHalf>(keys, at[i] + h), scores[i]);
  }
  scores *= Broadcast(1.0f / __builtin_sqrtf(static_cast<float>(width)));
  Ints lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  const int32_t before = static_cast<int32_t>(std::clamp<int64_t>(query.oldest - position, 0, kLanes));
  const int32_t behind = static_cast<int32_t>(std::clamp<int64_t>(query.newest - position, -1, kLanes));
  scores = lane < before ? Broadcast(-__builtin_inff()) : scores;
  scores = lane > behind ? Broadcast(-__builtin_inff()) : scores;
  return scores;
}

// Turns scores into weights exp(score - the largest); total is their sum, the sink's included.
template <bool kHalf>
void Weigh(Query& query, int64_t first, int64_t last) {
  Floats peak = Broadcast(query.sink == nullptr ? -__builtin_inff() : *query.sink), sums = {};
  for (int64_t p = first; p <= last; p += kLanes)
    if (Overlaps(query, p)) peak = Max(Load<Floats>(query.weights + p - first), peak);
  float most = peak[0];
  for (int i = 1; i < kLanes; ++i) most = std::max(most, peak[i]);
  for (int64_t p = first; p <= last; p += kLanes) {
    if (!Overlaps(query, p)) continue;
    Floats weights = Exp(Load<Floats>(query.weights + p - first) - most);
    sums += weights;
    PutLanes<kPairs<kHalf>>(query.weights, p - first, weights);  // bfloat16: never ahead of the scores that are left
  }
  query.total = query.sink == nullptr ? 0.0f : Exp(Broadcast(*query.sink - most))[0];
  for (int i = 0; i < kLanes; ++i) query.total += sums[i];
}

constexpr int kBlocks = 2;                       // blocks of kLanes columns that are summed in registers together
constexpr int kAlike = kManyRegisters ? 4 : 3;  // queries whose sums then fit into registers

// sums += columns h .. h + kBlocks * kLanes - 1 of position i's value, times its weight.
template <bool kHalf, int kQueries>
PEAGLE_INLINE void AddValue(const float* const (&weights)[kQueries], int64_t i, const void* values, const int64_t* at,
                            int64_t h, Floats (&sums)[kQueries][kBlocks]) {
  Floats read[kBlocks];
  for (int b = 0; b < kBlocks; ++b) read[b] = LoadLanes<kHalf>(values, at[i] + h + b * kLanes);
  for (int q = 0; q < kQueries; ++q)
    for (int b = 0; b < kBlocks; ++b) sums[q][b] = MulAdd(read[b], weights[q][i], sums[q][b]);
}

#if defined(__AVX512BF16__)
// The same for positions i and i + 1, as pairs. A position outside begin .. end - 1, which the queries do not read, counts
// as 0.
template <int kQueries>
PEAGLE_INLINE void AddPairOfValues(const float* const (&weights)[kQueries], int64_t i, int64_t begin, int64_t end,
                                   const void* values, const int64_t* at, int64_t h, Floats (&sums)[kQueries][kBlocks]) {
  static_assert(kBlocks == 2);
  const auto load = [&](int64_t j) {
    return j >= begin && j < end ? _mm512_loadu_si512(static_cast<const uint16_t*>(values) + at[j] + h) : __m512i{};
  };
  alignas(64) static constexpr auto kTurns = [] {  // column c of both positions
    std::array<uint16_t, 64> places{};
    for (int c = 0; c < 32; ++c) places[2 * c] = static_cast<uint16_t>(c), places[2 * c + 1] = static_cast<uint16_t>(32 + c);
    return places;
  }();
  const __m512i first = load(i), second = load(i + 1);
  for (int b = 0; b < kBlocks; ++b) {
    const __m512i both = _mm512_permutex2var_epi16(first, _mm512_load_si512(kTurns.data() + 32 * b), second);
    for (int q = 0; q < kQueries; ++q)
      sums[q][b] = AddPairs(reinterpret_cast<Floats>(both), Repeat(weights[q] + i / 2), sums[q][b]);
  }
}
#endif

// sums += a stretch's weights times its values in order, for queries that all read its positions begin .. end - 1, and for
// columns first .. last - 1 of the head.
template <bool kHalf, int kQueries>
void AddValues(const Query* queries, int64_t offset, const void* values, const int64_t* at, int64_t begin, int64_t end,
               int64_t head_dim, int64_t first, int64_t last) {
  const float* weights[kQueries];
  for (int q = 0; q < kQueries; ++q) weights[q] = queries[q].weights + offset / kInputs<kHalf>;
  int64_t h = first;
  for (; h + kBlocks * kLanes <= last; h += kBlocks * kLanes) {
    Floats sums[2][kQueries][kBlocks];
    for (int j = 0; j < 2; ++j)
      for (int q = 0; q < kQueries; ++q)
        for (int b = 0; b < kBlocks; ++b) sums[j][q][b] = Load<Floats>(queries[q].sums + j * head_dim + h + b * kLanes);
    constexpr int64_t n = kInputs<kHalf>;  // positions of a step
    auto add = [&](int64_t i, int j) {
#if defined(__AVX512BF16__)
      if constexpr (kHalf) return AddPairOfValues<kQueries>(weights, i, begin, end, values, at, h, sums[j]);
#endif
      AddValue<kHalf, kQueries>(weights, i, values, at, h, sums[j]);
    };
    int64_t i = begin / n * n;
    if (i / n % 2 == 1 && i < end) add(i, 1), i += n;
    for (; i + n < end; i += 2 * n) {
      add(i, 0);
      add(i + n, 1);
    }
    if (i < end) add(i, 0);
    for (int j = 0; j < 2; ++j)
      for (int q = 0; q < kQueries; ++q)
        for (int b = 0; b < kBlocks; ++b) Store(queries[q].sums + j * head_dim + h + b * kLanes, sums[j][q][b]);
  }
  for (; h < last; ++h)
    for (int64_t i = begin; i < end; ++i)
      for (int q = 0; q < kQueries; ++q) {
        float& sum = queries[q].sums[i % 2 * head_dim + h];
        sum = MulAdd(LoadOne<kPairs<kHalf>>(weights[q], i), LoadOne<kHalf>(values, at[i] + h), sum);
      }
}

// Threads divide the positions of a pair of sequence and kv head, rather than its queries, if there are fewer than kFewPairs
// pairs for each thread, kLong positions or more, and at most kMostWeights weights.
constexpr int64_t kFewPairs = 2, kLong = 256, kMostWeights = 1 << 20;

constexpr int64_t kWorthTurning = 6;  // from this many queries on, transposing the keys saves time
constexpr int64_t kMostRows = 16;     // rows whose queries share a chunk

// Queries of one sequence and one kv head, and what is common to them.
struct Group {
  Query* queries;
  int64_t count, sequence, kv_head;
  int64_t oldest, newest;  // of all positions that are read
  int64_t first, last;     // of those that are computed: first is a multiple of kLanes
};

// Takes queries begin .. end - 1 of a pair of sequence and kv head, counted row by row and head by head. Queries that see
// nothing get their output, zeros, here.
template <bool kHalf>
Group Gather(const Attention& op, int64_t pair, int64_t begin, int64_t end, Scratch& memory) {
  const int64_t repeat = op.heads / op.kv_heads, width = op.head_dim;
  Group group{memory.Take<Query>(end - begin), 0, pair / op.kv_heads, pair % op.kv_heads, INT64_MAX, 0, 0, 0};
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = group.sequence * op.width + i / repeat, head = group.kv_head * repeat + i % repeat;
    Query& query = group.queries[group.count];
    query.place = (row * op.heads + head) * width;
    query.newest = op.last[row];
    query.oldest = op.first[row];
    if (query.newest < query.oldest) {  // it sees nothing
      for (int64_t h = 0; h < width; ++h) Put<kHalf>(op.out, query.place + h, 0.0f);
      continue;
    }
    query.sink = op.sinks == nullptr ? nullptr : op.sinks + head;
    group.oldest = std::min(group.oldest, query.oldest);
    group.newest = std::max(group.newest, query.newest);
    ++group.count;
  }
  if (group.count == 0) return group;
  group.first = group.oldest / kLanes * kLanes, group.last = group.newest;
  const int64_t span = (group.last - group.first) / kLanes * kLanes + kLanes;
  float* const scratch = memory.Take<float>(group.count * (3 * width + span));
  for (int64_t i = 0; i < group.count; ++i) {
    Query& query = group.queries[i];
    float* const copy = scratch + i * (3 * width + span);
    query.sums = copy + width;
    query.weights = query.sums + 2 * width;
    if (kHalf && !kPairs<kHalf>) {
      Widen(static_cast<const uint16_t*>(op.query) + query.place, width, copy);
      query.vector = copy;
    } else {
      query.vector = reinterpret_cast<const float*>(static_cast<const char*>(op.query) + query.place * (kHalf ? 2 : 4));
    }
    std::fill_n(query.sums, 2 * width, 0.0f);
  }
  return group;
}

Places PlacesFrom(const Attention& op, const Group& group, int64_t position) {
  Places places;
  int64_t index = std::clamp(position, group.oldest, group.newest), at = op.At(group.sequence, index);
  int64_t left = op.page_size - index % op.page_size;  // counted down, because divisions are slow
  for (int64_t i = 0; i < kStretch; ++i) {
    const int64_t next = std::clamp(position + i, group.oldest, group.newest);
    if (next != index) {
      at += op.kv_heads;  // positions of a page are consecutive
      if (--left == 0) at = op.At(group.sequence, next), left = op.page_size;
    }
    index = next;
    places.at[i] = (at + group.kv_head) * op.head_dim;
  }
  return places;
}

// Scores of positions begin .. end - 1; begin is a multiple of kStretch after the group's first. A tile of keys is loaded
// once for all queries.
template <bool kHalf>
void ScorePositions(const Attention& op, const Group& group, int64_t begin, int64_t end) {
  const int64_t width = op.head_dim, count = group.count, first = group.first;
  const Query* const queries = group.queries;
  const bool turn = count >= kWorthTurning;
  Scratch memory;
  float* const turned = memory.Take<float>(turn ? width * kLanes : 0);
  auto score = [&](int64_t p, const int64_t* at) {
    auto put = [&](Floats scores, const Query& query) {
      Store(query.weights + p - first, Finish<kHalf>(scores, query, op.key, at, p, width));
    };
    auto by = [&]<int kQueries>(int64_t i) {
      for (; i + kQueries <= count; i += kQueries) {
        Floats scores[kQueries];
        width == 64 ? ScoresTurned<kHalf, kQueries, 64>(&queries[i], turned, width, scores)
                    : ScoresTurned<kHalf, kQueries, 0>(&queries[i], turned, width, scores);
        for (int q = 0; q < kQueries; ++q) put(scores[q], queries[i + q]);
      }
      return i;
    };
    if (turn) {
      TurnKeys<kHalf>(op.key, at, width, turned);
      by.template operator()<1>(by.template operator()<2>(by.template operator()<4>(0)));
      return;
    }
    for (int64_t i = 0; i < count; ++i) {
      if (!Overlaps(queries[i], p)) continue;
      put(width == 64 ? Scores<kHalf, 64>(queries[i], op.key, at, width) : Scores<kHalf, 0>(queries[i], op.key, at, width),
          queries[i]);
    }
  };
  for (int64_t p = begin; p < end; p += kStretch) {
    const Places places = PlacesFrom(op, group, p);
    for (int64_t i = 0; i < kStretch && p + i < end; i += kLanes) score(p + i, places.at + i);
  }
}

// Sums the values by their weights, and writes the output, in columns first .. last - 1 of the head.
template <bool kHalf>
void SumColumns(const Attention& op, const Group& group, int64_t first, int64_t last) {
  const Query* const queries = group.queries;
  const int64_t width = op.head_dim;
  for (int64_t p = group.first; p <= group.last; p += kStretch) {
    const Places places = PlacesFrom(op, group, p);
    auto from = [&](int64_t i) { return std::max<int64_t>(0, queries[i].oldest - p); };
    auto to = [&](int64_t i) { return std::min(kStretch, queries[i].newest - p + 1); };
    auto add = [&]<int kQueries>(int64_t i) {
      AddValues<kHalf, kQueries>(&queries[i], p - group.first, op.value, places.at, from(i), to(i), width, first,
                                          last);
    };
    for (int64_t i = 0; i < group.count;) {
      int64_t alike = 1;
      while (alike < kAlike && i + alike < group.count && from(i) == from(i + alike) && to(i) == to(i + alike)) ++alike;
      if (alike == kAlike) add.template operator()<kAlike>(i);
      else if (alike == 3) add.template operator()<3>(i);
      else if (alike == 2) add.template operator()<2>(i);
      else add.template operator()<1>(i);
      i += alike;
    }
  }
  for (int64_t i = 0; i < group.count; ++i) {
    const Query& query = queries[i];
    int64_t h = first;
    for (; h + kLanes <= last; h += kLanes) {
      const Floats sums = Load<Floats>(query.sums + h) + Load<Floats>(query.sums + width + h);
      PutLanes<kHalf>(op.out, query.place + h, sums / query.total);
    }
    for (; h < last; ++h) Put<kHalf>(op.out, query.place + h, (query.sums[h] + query.sums[width + h]) / query.total);
  }
}

// Computes queries begin .. end - 1 of a pair of sequence and kv head.
template <bool kHalf>
void Attend(const Attention& op, int64_t pair, int64_t begin, int64_t end) {
  Scratch memory;
  const Group group = Gather<kHalf>(op, pair, begin, end, memory);
  if (group.count == 0) return;
  ScorePositions<kHalf>(op, group, group.first, group.last + 1);
  for (int64_t i = 0; i < group.count; ++i) Weigh<kHalf>(group.queries[i], group.first, group.last);
  SumColumns<kHalf>(op, group, 0, op.head_dim);
}

// Computes all queries. Threads divide the positions of a pair for its scores, and its columns for its sums, so one thread
// reads a key or value, and few queries keep all threads busy.
template <bool kHalf>
void AttendTogether(const Attention& op, int64_t pairs, int64_t work, Parallel& parallel) {
  const int64_t queries = op.width * (op.heads / op.kv_heads);
  Scratch memory;
  Group* const groups = memory.Take<Group>(pairs);
  int64_t longest = 0;
  for (int64_t pair = 0; pair < pairs; ++pair) {
    groups[pair] = Gather<kHalf>(op, pair, 0, queries, memory);
    if (groups[pair].count > 0) longest = std::max(longest, groups[pair].last - groups[pair].first + 1);
  }
  const int64_t share = (longest + parallel.threads() * kStretch - 1) / (parallel.threads() * kStretch) * kStretch;
  const int64_t shares = std::max<int64_t>(1, (longest + share - 1) / std::max<int64_t>(share, 1));
  ForEach(parallel, pairs * shares, work / 2, [&](int64_t chunk) {
    const Group& group = groups[chunk / shares];
    const int64_t begin = group.first + chunk % shares * share, end = std::min(group.last + 1, begin + share);
    if (group.count > 0 && begin < end) ScorePositions<kHalf>(op, group, begin, end);
  });
  ForEach(parallel, pairs * queries, work / 8, [&](int64_t chunk) {
    const Group& group = groups[chunk / queries];
    if (chunk % queries < group.count) Weigh<kHalf>(group.queries[chunk % queries], group.first, group.last);
  });
  const int64_t slice = kBlocks * kLanes, slices = std::max<int64_t>(1, op.head_dim / slice);
  ForEach(parallel, pairs * slices, work / 2, [&](int64_t chunk) {
    const Group& group = groups[chunk / slices];
    const int64_t number = chunk % slices, last = number + 1 == slices ? op.head_dim : (number + 1) * slice;
    if (group.count > 0) SumColumns<kHalf>(op, group, number * slice, last);
  });
}

// Rotates pairs (x[i], x[i + half]) by the row's angles.
template <bool kHalf>
void Rotate(const float* x, const float* cos, const float* sin, int64_t half, void* out, int64_t at) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Floats a = Load<Floats>(x + i), b = Load<Floats>(x + i + half);
    const Floats c = Load<Floats>(cos + i), s = Load<Floats>(sin + i);
    PutLanes<kHalf>(out, at + i, MulAdd(a, c, -(b * s)));
    PutLanes<kHalf>(out, at + i + half, MulAdd(b, c, a * s));
  }
  for (; i < half; ++i) {
    Put<kHalf>(out, at + i, MulAdd(x[i], cos[i], -(x[i + half] * sin[i])));
    Put<kHalf>(out, at + i + half, MulAdd(x[i + half], cos[i], x[i] * sin[i]));
  }
}

template <bool kHalf>
void RotateAndWriteAs(const Attention& op, const Rotation& rotation, Parallel& parallel) {
  const int64_t width = op.head_dim, half = width / 2, heads = op.heads + 2 * op.kv_heads, rows = op.batch * op.width;
  ForEach(parallel, rows, rows * heads * width, [&](int64_t row) {
    const float* qkv = rotation.qkv + row * heads * width;
    const float *cos = rotation.cos + row * half, *sin = rotation.sin + row * half;
    for (int64_t n = 0; n < op.heads; ++n)
      Rotate<kHalf>(qkv + n * width, cos, sin, half, rotation.query, (row * op.heads + n) * width);
    if (op.write[row] < 0) return;
    const float* keys = qkv + op.heads * width;
    const float* values = keys + op.kv_heads * width;
    const int64_t at = op.At(row / op.width, op.write[row]) * width;
    for (int64_t g = 0; g < op.kv_heads; ++g)
      Rotate<kHalf>(keys + g * width, cos, sin, half, rotation.key, at + g * width);
    int64_t i = 0;
    for (; i + kLanes <= op.kv_heads * width; i += kLanes)
      PutLanes<kHalf>(rotation.value, at + i, Load<Floats>(values + i));
    for (; i < op.kv_heads * width; ++i) Put<kHalf>(rotation.value, at + i, values[i]);
  });
}

}  // namespace

void RotateAndWrite(const Attention& op, const Rotation& rotation, Parallel& parallel) {
  op.bfloat16 ? RotateAndWriteAs<true>(op, rotation, parallel) : RotateAndWriteAs<false>(op, rotation, parallel);
}

void RunAttention(const Attention& op, Parallel& parallel) {
  int64_t longest = 1, all = 0, active = 0;
  for (int64_t row = 0; row < op.batch * op.width; ++row) {
    const int64_t seen = std::max<int64_t>(int64_t{op.last[row]} - op.first[row] + 1, 0);
    longest = std::max(longest, seen);
    all += seen;
    active += seen > 0;
  }
  const int64_t repeat = op.heads / op.kv_heads, queries = op.width * repeat, pairs = op.batch * op.kv_heads;
  const int64_t work = 4 * all * op.heads * op.head_dim, shares = Shares(work, parallel);
  if (shares > 1 && pairs < kFewPairs * shares && longest >= kLong && pairs * queries * longest <= kMostWeights) {
    op.bfloat16 ? AttendTogether<true>(op, pairs, work, parallel) : AttendTogether<false>(op, pairs, work, parallel);
    return;
  }
  // queries per chunk: their weights fit into 1 MB, and there are chunks for all threads
  const int64_t most = std::clamp<int64_t>((1 << 18) / longest, repeat, kMostRows * repeat);
  const int64_t block = std::clamp<int64_t>((active * op.heads + shares - 1) / shares, 2, std::max<int64_t>(2, most));
  const int64_t blocks = (queries + block - 1) / block;
  ForEach(parallel, pairs * blocks, work, [&](int64_t chunk) {
    const int64_t begin = chunk % blocks * block;
    auto attend = op.bfloat16 ? Attend<true> : Attend<false>;
    attend(op, chunk / blocks, begin, std::min(queries, begin + block));
  });
}

}  // namespace peagle
