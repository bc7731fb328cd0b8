// A product of few rows, up to 16, by a matrix of bfloat16: reading the matrix takes all of the time.
//
// A block computes kLinearGroups groups of outputs and its warps split the inputs: 16 at a time, in turns. A lane's loads
// bypass shared memory: with lane = 4 group + quarter, it reads a group of outputs of inputs 4 quarter .. + 3, so that the
// loads of a warp are whole lines. Output n of a product is output (n, h) of group n: products take any inputs and outputs,
// as long as both factors agree.
//
// The warps' sums are added in the same order, so a row's bits depend neither on the other rows nor on their number.

namespace {

constexpr int kLinearWarps = 16, kLinearThreads = 32 * kLinearWarps;
constexpr int kLinearRows = 16, kLinearGroups = 8;

// kEach neighbouring outputs, of one input.
template <int kEach>
struct Outputs {
  unsigned of[kEach / 2];
};

// out [T, outputs] = x [T, inputs] weights [inputs, outputs] + bias [outputs], if any, + residual [T, outputs], if any.
// Inputs are a multiple of 16, outputs of 8 kEach. Blocks: (outputs / (8 kEach)).
template <int kEach>
__device__ inline void Linear(const Half* x, const Half* weights, const Half* bias, const Half* residual, int rows,
                              int inputs, int outputs, Half* out) {
  constexpr int kColumns = kLinearGroups * kEach;
  constexpr int kAhead = kEach == 8 ? 3 : 4;  // steps of 16 inputs whose weights are in flight together: what registers hold
  __shared__ float sums[kLinearWarps][kLinearRows / 2][kColumns + 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = lane / 4, quarter = lane % 4;
  const int steps = inputs / 16, column = blockIdx.x * kColumns + group * kEach;
  const bool low = group < rows, high = group + 8 < rows;
  float totals[kEach][4] = {};
  Outputs<kEach> matrix[kAhead][4];
  unsigned values[kAhead][4];
  const auto load = [&](int s, int step) {
    const int input = 16 * step + 4 * quarter;
    const bool there = step < steps;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      LoadStream(matrix[s][i].of, there, weights + static_cast<long long>(input + i) * outputs + column);
    LoadTwo(values[s], there && low, x + static_cast<long long>(group) * inputs + input);
    LoadTwo(values[s] + 2, there && high, x + static_cast<long long>(group + 8) * inputs + input);
  };
#pragma unroll
  for (int s = 0; s < kAhead; ++s) load(s, warp + s * kLinearWarps);
#pragma unroll 1
  for (int first = warp; first < steps; first += kLinearWarps * kAhead) {
#pragma unroll
    for (int s = 0; s < kAhead; ++s) {
      const unsigned a[4] = {values[s][0], values[s][2], values[s][1], values[s][3]};
#pragma unroll
      for (int h = 0; h < kEach; ++h) {
        const unsigned(&m)[4][kEach / 2] = reinterpret_cast<const unsigned(&)[4][kEach / 2]>(matrix[s]);
        const unsigned b[2] = {h % 2 ? Upper(m[0][h / 2], m[1][h / 2]) : Lower(m[0][h / 2], m[1][h / 2]),
                               h % 2 ? Upper(m[2][h / 2], m[3][h / 2]) : Lower(m[2][h / 2], m[3][h / 2])};
        MultiplyAdd(totals[h], a, b);
      }
      load(s, first + (s + kAhead) * kLinearWarps);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (8 * half >= rows) break;
#pragma unroll
    for (int h = 0; h < kEach; ++h)
#pragma unroll
      for (int i = 0; i < 2; ++i) sums[warp][group][(2 * quarter + i) * kEach + h] = totals[h][2 * half + i];
    __syncthreads();
    for (int i = threadIdx.x; i < kLinearRows / 2 * kColumns; i += kLinearThreads) {
      const int row = 8 * half + i / kColumns, own = i % kColumns, output = blockIdx.x * kColumns + own;
      if (row >= rows) break;
      float total = 0;
#pragma unroll
      for (int w = 0; w < kLinearWarps; ++w) total += sums[w][i / kColumns][own];
      const long long at = static_cast<long long>(row) * outputs + output;
      if (bias != nullptr) total += ToFloat(bias[output]);
      if (residual != nullptr) total += ToFloat(residual[at]);
      out[at] = ToHalf(total);
    }
    __syncthreads();
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kLinearThreads, 1) peagle_linear_8(const Half* x, const Half* weights,
                                                                               const Half* bias, const Half* residual,
                                                                               int rows, int inputs, int outputs, Half* out) {
  Linear<8>(x, weights, bias, residual, rows, inputs, outputs, out);
}

extern "C" __global__ void __launch_bounds__(kLinearThreads, 1) peagle_linear_4(const Half* x, const Half* weights,
                                                                               const Half* bias, const Half* residual,
                                                                               int rows, int inputs, int outputs, Half* out) {
  Linear<4>(x, weights, bias, residual, rows, inputs, outputs, out);
}
