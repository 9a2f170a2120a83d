// Multilayer perceptrons on a CPU, forward and backward, tile by tile; see mlp.py for what is replaced by this.
//
// A tile is 48 rows: their activations and the weights of a layer of 64 stay in the first-level cache, where a product
// of matrices after the other goes through memory. Inputs and outputs are contiguous float32, of one network
// ([rows, in], [out, in], [out]) or of P ([P, rows, in], [P, out, in], [P, out]). Hidden layers have multiples of 16.

#include <omp.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#ifdef __AVX__
#include <immintrin.h>
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using torch::stable::Tensor;

// --- As many numbers as a register has: wider vectors, GCC takes apart through memory, 25 times as slow ------------

// LANES numbers are a vector. So many vectors of a row of sums stay in registers: WIDEST of six rows side by side, and
// SPARSEST of one that leaves out zeros.
#if defined(__AVX512F__)
#define EACH_LANE(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)
constexpr long LANES = 16;
constexpr int WIDEST = 4, SPARSEST = 4;
#elif defined(__AVX__)
#define EACH_LANE(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)
constexpr long LANES = 8;
constexpr int WIDEST = 2, SPARSEST = 8;
#else
#define EACH_LANE(f) f(0), f(1), f(2), f(3)
constexpr long LANES = 4;
constexpr int WIDEST = 2, SPARSEST = 8;
#endif
constexpr long TILE = 48, MOST_LAYERS = 4, FEW = 8;
typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int Ints __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4)));

inline Vec load(const float* p) { return *reinterpret_cast<const Loose*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<Loose*>(p) = v; }

// The rational approximation of cpu_kernels.py.
inline Vec tanh(Vec x) {
  const Vec top = Vec{} + 7.90531110763549805f;
  x = x > top ? top : x;
  x = x < -top ? -top : x;
  const Vec s = x * x;
  Vec p = s * -2.76076847742355e-16f + 2.00018790482477e-13f;
  p = p * s + -8.60467152213735e-11f;
  p = p * s + 5.12229709037114e-08f;
  p = p * s + 1.48572235717979e-05f;
  p = p * s + 6.37261928875436e-04f;
  p = p * s + 4.89352455891786e-03f;
  Vec q = s * 1.19825839466702e-06f + 1.18534705686654e-04f;
  q = q * s + 2.26843463243900e-03f;
  q = q * s + 4.89352518554385e-03f;
  return x * p / q;
}

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Ints{__VA_ARGS__}))
#endif
#define UPPER(k) (k & W ? k - W + LANES : k)
#define LOWER(k) (k & W ? k + LANES : k + W)
#define OWN(k) (k & W ? k + LANES : k)  // a blend, where `UPPER` is a shuffle
#define OTHER(k) (k & W ? k - W + LANES : k + W)

// Lane k is the sum of vector k, which is lost.
template <int W = LANES / 2>
inline Vec sums(Vec* vectors) {
#pragma GCC unroll 8
  for (int i = 0; i < W; i++)
    vectors[i] = SHUFFLE(vectors[i], vectors[i + W], EACH_LANE(OWN)) + SHUFFLE(vectors[i], vectors[i + W], EACH_LANE(OTHER));
  if constexpr (W > 1) return sums<W / 2>(vectors);
  return vectors[0];
}

enum Activation { LINEAR, TANH, RELU };  // the numbers are those of mlp.py

inline Vec activate(Activation kind, Vec x) {
  if (kind == TANH) return tanh(x);
  if (kind == RELU) return x < 0.0f ? Vec{} : x;  // NaN stays NaN
  return x;
}

// dx from dy, for y = activate(x).
inline Vec differentiate(Activation kind, Vec dy, Vec y) {
  if (kind == TANH) return dy - dy * y * y;
  return y <= 0.0f ? Vec{} : dy;
}

// --- Products of matrices ------------------------------------------------------------------------------------------

// A strided matrix, so that its transpose is one as well.
struct View {
  const float* data;
  long row, column;
};

// MR rows times NV vectors of a product: what End begins with, plus A[MR, depth] B[depth, NV * LANES], to End. B has
// contiguous rows. With six rows of `WIDEST` vectors all sums stay in registers.
template <int MR, int NV, class End>
inline void block(long depth, View a, const float* b, long ldb, const End& end) {
  Vec sums[MR][NV];
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) sums[r][v] = end.begin(r, v);
  for (long k = 0; k < depth; k++) {
    Vec own[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) own[v] = load(b + k * ldb + LANES * v);
#pragma GCC unroll 8
    for (int r = 0; r < MR; r++) {
      const float x = a.data[r * a.row + k * a.column];
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++) sums[r][v] += x * own[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; r++)
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) end.end(r, v, sums[r][v]);
}

template <int NV, class End>
void columns(long rows, long depth, View a, const float* b, long ldb, const End& end, long j) {
  long i = 0;
  auto from = [&](long row) { return View{a.data + row * a.row, a.row, a.column}; };
  for (; i + 6 <= rows; i += 6) block<6, NV>(depth, from(i), b, ldb, end.at(i, j));
  if (i + 4 <= rows) {
    block<4, NV>(depth, from(i), b, ldb, end.at(i, j));
    i += 4;
  }
  if (i + 2 <= rows) {
    block<2, NV>(depth, from(i), b, ldb, end.at(i, j));
    i += 2;
  }
  if (i < rows) block<1, NV>(depth, from(i), b, ldb, end.at(i, j));
}

// A[rows, depth] B[depth, cols] to End; cols is a multiple of LANES.
template <class End>
void product(long rows, long cols, long depth, View a, const float* b, long ldb, const End& end) {
  long j = 0;
  for (; j + WIDEST * LANES <= cols; j += WIDEST * LANES) columns<WIDEST>(rows, depth, a, b + j, ldb, end, j);
  switch ((cols - j) / LANES) {
    case 3: return columns<std::min(3, WIDEST)>(rows, depth, a, b + j, ldb, end, j);
    case 2: return columns<2>(rows, depth, a, b + j, ldb, end, j);
    case 1: return columns<1>(rows, depth, a, b + j, ldb, end, j);
  }
}

struct Activated {  // out = activate(bias + product)
  const float* bias;
  float* out;
  long ld;
  Activation kind;
  Activated at(long i, long j) const { return {bias + j, out + i * ld + j, ld, kind}; }
  Vec begin(int, int v) const { return load(bias + LANES * v); }
  void end(int r, int v, Vec x) const { store(out + r * ld + LANES * v, activate(kind, x)); }
};

struct Differentiated {  // out = the derivative of the activation `y`, times product
  const float* y;
  float* out;
  long ld;
  Activation kind;
  Differentiated at(long i, long j) const { return {y + i * ld + j, out + i * ld + j, ld, kind}; }
  Vec begin(int, int) const { return Vec{}; }
  void end(int r, int v, Vec x) const {
    store(out + r * ld + LANES * v, differentiate(kind, x, load(y + r * ld + LANES * v)));
  }
};

struct Added {  // out += product
  float* out;
  long ld;
  Added at(long i, long j) const { return {out + i * ld + j, ld}; }
  Vec begin(int r, int v) const { return load(out + r * ld + LANES * v); }
  void end(int r, int v, Vec x) const { store(out + r * ld + LANES * v, x); }
};

// to[NV * LANES] += the sum of the rows
template <int NV>
void add_rows(long rows, long ld, const float* from, float* to) {
  Vec totals[NV];
#pragma GCC unroll 4
  for (int v = 0; v < NV; v++) totals[v] = load(to + LANES * v);
  for (long r = 0; r < rows; r++)
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) totals[v] += load(from + r * ld + LANES * v);
#pragma GCC unroll 4
  for (int v = 0; v < NV; v++) store(to + LANES * v, totals[v]);
}

// --- Inputs that are mostly zero, such as boards of bits ------------------------------------------------------------

// From so many inputs on it is worth a look which of them are zero, and then leaving these out, if three in four are.
constexpr long WIDE = TORCHPOD_WIDE, DENSE_FROM = 4;  // the first is of mlp.py

// What is not zero in the rows of a tile: columns and values, row after row.
struct Sparse {
  int* column;
  float* value;
  long start[TILE + 1];
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// For each of the 256 sets of lanes, these lanes in order, a byte each, the first the lowest.
constexpr auto CHOSEN = [] {
  std::array<uint64_t, 256> found{};
  for (uint64_t mask = 0; mask < 256; mask++)
    for (uint64_t lane = 8; lane-- > 0;)
      if (mask >> lane & 1) found[mask] = found[mask] << 8 | lane;
  return found;
}();
#endif

// Takes `room` for 2 * (rows * in + LANES) numbers.
inline Sparse compress(long rows, long in, const float* x, float* room) {
  Sparse found{reinterpret_cast<int*>(room), room + rows * in + LANES, {}};
  long count = 0;
  for (long r = 0; r < rows; r++) {
    found.start[r] = count;
    const float* row = x + r * in;
    long i = 0;
#ifdef __AVX512F__
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; i + LANES <= in; i += LANES) {
      const __m512 v = _mm512_loadu_ps(row + i);
      const __mmask16 mask = _mm512_cmp_ps_mask(v, _mm512_setzero_ps(), _CMP_NEQ_UQ);
      const __m512i columns = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(i)));
      _mm512_storeu_si512(found.column + count, _mm512_maskz_compress_epi32(mask, columns));
      _mm512_storeu_ps(found.value + count, _mm512_maskz_compress_ps(mask, v));
      count += __builtin_popcount(mask);
    }
#elif defined(__AVX2__)
    for (; i + LANES <= in; i += LANES) {
      const __m256 v = _mm256_loadu_ps(row + i);
      const int mask = _mm256_movemask_ps(_mm256_cmp_ps(v, _mm256_setzero_ps(), _CMP_NEQ_UQ));
      const __m256i lanes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(CHOSEN[mask])));
      const __m256i columns = _mm256_add_epi32(lanes, _mm256_set1_epi32(static_cast<int>(i)));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(found.column + count), columns);
      _mm256_storeu_ps(found.value + count, _mm256_permutevar8x32_ps(v, lanes));
      count += __builtin_popcount(mask);
    }
#endif
    for (; i < in; i++) {
      found.column[count] = static_cast<int>(i);
      found.value[count] = row[i];
      count += row[i] != 0.0f;
    }
  }
  found.start[rows] = count;
  return found;
}

inline bool dense(const Sparse& x, long rows, long in) { return x.start[rows] * DENSE_FROM > rows * in; }

// X[rows, in] B[in, NV * LANES] to End.
template <int NV, class End>
void sparse_columns(long rows, const Sparse& x, const float* b, long ldb, const End& end, long j) {
  constexpr int PARTS = 8 / NV;  // sums side by side, as many as a processor adds while one waits for its result
  for (long r = 0; r < rows; r++) {
    const End own = end.at(r, j);
    Vec sums[PARTS][NV]{};
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) sums[0][v] = own.begin(0, v);
    auto add = [&](long n, int part) {
      const float* row = b + x.column[n] * ldb + j;
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++) sums[part][v] += x.value[n] * load(row + LANES * v);
    };
    long n = x.start[r];
    for (; n + PARTS <= x.start[r + 1]; n += PARTS)
#pragma GCC unroll 8
      for (int part = 0; part < PARTS; part++) add(n + part, part);
    for (; n < x.start[r + 1]; n++) add(n, 0);
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) {
#pragma GCC unroll 8
      for (int part = 1; part < PARTS; part++) sums[0][v] += sums[part][v];
      own.end(0, v, sums[0][v]);
    }
  }
}

template <class End>
void sparse_product(long rows, long cols, const Sparse& x, const float* b, long ldb, const End& end) {
  long j = 0;
  for (; j + SPARSEST * LANES <= cols; j += SPARSEST * LANES) sparse_columns<SPARSEST>(rows, x, b, ldb, end, j);
  for (; j < cols; j += LANES) sparse_columns<1>(rows, x, b, ldb, end, j);
}

// to[in, size] += X[rows, in]^T dz[rows, size], NV vectors of each row from column j on.
template <int NV>
void add_sparse_columns(long rows, long size, const Sparse& x, const float* dz, float* to, long j) {
  for (long r = 0; r < rows; r++) {
    Vec own[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; v++) own[v] = load(dz + r * size + j + LANES * v);
    for (long n = x.start[r]; n < x.start[r + 1]; n++) {
      float* sums = to + x.column[n] * size + j;
#pragma GCC unroll 8
      for (int v = 0; v < NV; v++) store(sums + LANES * v, load(sums + LANES * v) + x.value[n] * own[v]);
    }
  }
}

void add_sparse(long rows, long size, const Sparse& x, const float* dz, float* to) {
  long j = 0;
  for (; j + SPARSEST * LANES <= size; j += SPARSEST * LANES) add_sparse_columns<SPARSEST>(rows, size, x, dz, to, j);
  for (; j < size; j += LANES) add_sparse_columns<1>(rows, size, x, dz, to, j);
}

// --- Products with few rows, from weights as they are: [size, in], both multiples of LANES ---------------------------

void few_rows(long rows, long size, long in, View a, const float* weights, const float* bias, Activation kind, float* y) {
  for (long r = 0; r < rows; r++)
    for (long o = 0; o < size; o += LANES) {
      Vec dots[LANES] = {};
      for (long i = 0; i < in; i += LANES) {
        const Vec x = load(a.data + r * a.row + i);
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) dots[j] += x * load(weights + (o + j) * in + i);
      }
      store(y + r * size + o, load(bias + o) + sums(dots));
    }
  // Apart from the sums, so that several are under way at the same time: one takes as long as 64 products.
  for (long i = 0; i < rows * size; i += LANES) store(y + i, activate(kind, load(y + i)));
}

// A head of a few outputs: `LANES` dot products at a time, of one row after the other.
void head(long rows, long size, long in, View a, const float* weights, const float* bias, float* out) {
  for (long begin = 0, r = 0, o = 0; begin < rows * size; begin += LANES) {
    const long count = std::min(LANES, rows * size - begin);
    Vec dots[LANES], biases{};
    for (long j = 0; j < LANES; j++) {
      dots[j] = Vec{};
      if (j >= count) continue;
      for (long i = 0; i < in; i += LANES) dots[j] += load(a.data + r * a.row + i) * load(weights + o * in + i);
      biases[j] = bias[o];
      if (++o == size) o = 0, r++;
    }
    const Vec y = biases + sums(dots);
    std::memcpy(out + begin, &y, sizeof(float) * count);
  }
}

// --- Networks ------------------------------------------------------------------------------------------------------

struct Network {
  std::vector<long> sizes;  // of the input, of each layer
  Activation kind;          // of hidden layers
  long rows;
  long layers() const { return sizes.size() - 1; }
  long widest() const { return up(*std::max_element(sizes.begin() + 1, sizes.end())); }
  static long up(long n) { return (n + LANES - 1) / LANES * LANES; }
  bool wide() const { return sizes[0] >= WIDE; }
  // Whether the weights of a layer are taken as they are: with so few rows putting them in order is more than the product.
  bool as_is(long l) const {
    return rows <= FEW && sizes[l] % LANES == 0 && sizes[l + 1] % LANES == 0 && !(l == 0 && wide());
  }
  // Numbers that the work on a tile needs: two layers, and what `compress` takes.
  long room() const { return 2 * TILE * widest() + (wide() ? 2 * up(TILE * sizes[0] + LANES) : 0); }
};

// Memory that a thread keeps from call to call; it begins with a line of the cache.
float* scratch(long size) {
  constexpr long LINE = 64;
  static thread_local std::vector<float> memory;
  if (const size_t all = size + LINE / sizeof(float); memory.size() < all) memory.resize(all);
  const auto address = reinterpret_cast<uintptr_t>(memory.data());
  return reinterpret_cast<float*>((address + LINE - 1) / LINE * LINE);
}

// A head so narrow that a dot product per output is less than a vector of outputs.
inline bool narrow(long outputs) { return outputs <= 4; }

long packed_size(const Network& net) {
  long size = 0;
  for (long l = 0; l < net.layers(); l++) size += (net.sizes[l] + 1) * Network::up(net.sizes[l + 1]);
  return size;
}

// Every [2 W, 2 W] of a [LANES, LANES] changes its upper right [W, W] for the lower left one; then those twice as large.
template <int W>
inline void swap_blocks(Vec* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) {
    if (i & W) continue;
    const Vec a = rows[i], b = rows[i + W];
    rows[i] = SHUFFLE(a, b, EACH_LANE(UPPER));
    rows[i + W] = SHUFFLE(a, b, EACH_LANE(LOWER));
  }
  if constexpr (2 * W < LANES) swap_blocks<2 * W>(rows);
}

// from[rows, cols] to to[cols, ld]
void transpose(long rows, long cols, const float* from, float* to, long ld) {
  const long whole_rows = rows / LANES * LANES, whole_cols = cols / LANES * LANES;
  for (long r = 0; r < whole_rows; r += LANES)
    for (long c = 0; c < whole_cols; c += LANES) {
      Vec own[LANES];
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) own[i] = load(from + (r + i) * cols + c);
      swap_blocks<1>(own);
#pragma GCC unroll 16
      for (int i = 0; i < LANES; i++) store(to + (c + i) * ld + r, own[i]);
    }
  for (long c = 0; c < cols; c++)
    for (long r = c < whole_cols ? whole_rows : 0; r < rows; r++) to[c * ld + r] = from[r * cols + c];
}

// Weights [in, up(out)] and biases [up(out)] of each layer, one after the other; those of a narrow head as they are.
void pack(const Network& net, const float* const* weights, const float* const* biases, float* to) {
  for (long l = 0; l < net.layers(); l++) {
    const long in = net.sizes[l], out = net.sizes[l + 1], ld = Network::up(out);
    if (ld > out) std::fill(to, to + (in + 1) * ld, 0.0f);
    if (l == net.layers() - 1 && narrow(out)) {
      std::memcpy(to, weights[l], sizeof(float) * in * out);
    } else if (!net.as_is(l)) {
      transpose(out, in, weights[l], to, ld);
    }
    std::memcpy(to + in * ld, biases[l], sizeof(float) * out);
    to += (in + 1) * ld;
  }
}

// Of rows [begin, end); hidden may be null, `own` has `net.room()`.
void forward_rows(const Network& net, long begin, long end, const float* x, const float* const* as_they_are,
                  const float* packed, float* out, float* const* hidden, float* own) {
  const long layers = net.layers(), room = TILE * net.widest();
  for (long first = begin; first < end; first += TILE) {
    const long rows = std::min(TILE, end - first);
    View a{x + first * net.sizes[0], net.sizes[0], 1};
    const float* weights = packed;
    for (long l = 0; l < layers; l++) {
      const long in = net.sizes[l], size = net.sizes[l + 1], ld = Network::up(size);
      const bool last = l == layers - 1;
      const float* bias = weights + in * ld;
      if (last && narrow(size)) {
        head(rows, size, in, a, weights, bias, out + first * size);
        break;
      }
      float* y = hidden && !last ? hidden[l] + first * size : own + l % 2 * room;
      const Activated result{bias, y, ld, last ? LINEAR : net.kind};
      if (net.as_is(l)) {
        few_rows(rows, size, in, a, as_they_are[l], bias, result.kind, y);
      } else if (l == 0 && net.wide()) {
        const Sparse found = compress(rows, in, a.data, own + 2 * room);
        dense(found, rows, in) ? product(rows, ld, in, a, weights, ld, result)
                               : sparse_product(rows, ld, found, weights, ld, result);
      } else {
        product(rows, ld, in, a, weights, ld, result);
      }
      if (last)
        for (long r = 0; r < rows; r++) std::memcpy(out + (first + r) * size, y + r * ld, sizeof(float) * size);
      a = View{y, ld, 1};
      weights += (in + 1) * ld;
    }
  }
}

// Whether the gradient of the first weights is summed as [in, out]: rows of `in` are no vectors, or mostly zero.
inline bool flipped(const Network& net) { return net.sizes[0] % LANES != 0 || net.wide(); }

// Adds the gradients of rows [begin, end); `own` has `net.room()`.
void backward_rows(const Network& net, long begin, long end, const float* x, const float* doutput,
                   const float* const* hidden, const float* const* weights, float* const* dweights,
                   float* const* dbiases, float* own) {
  const long layers = net.layers(), room = TILE * net.widest();
  for (long first = begin; first < end; first += TILE) {
    const long rows = std::min(TILE, end - first);
    const float* dz = doutput + first * net.sizes[layers];
    for (long l = layers - 1; l >= 0; l--) {
      const long in = net.sizes[l], size = net.sizes[l + 1];
      const float* a = (l ? hidden[l - 1] : x) + first * in;
      if (l == 0 && flipped(net)) {
        const Sparse found = net.wide() ? compress(rows, in, a, own + 2 * room) : Sparse{};
        !net.wide() || dense(found, rows, in) ? product(in, size, rows, View{a, 1, in}, dz, size, Added{dweights[0], size})
                                              : add_sparse(rows, size, found, dz, dweights[0]);
      } else {
        product(size, in, rows, View{dz, 1, size}, a, in, Added{dweights[l], in});
      }
      long o = 0;
      for (; o + 4 * LANES <= size; o += 4 * LANES) add_rows<4>(rows, size, dz + o, dbiases[l] + o);
      for (; o + LANES <= size; o += LANES) add_rows<1>(rows, size, dz + o, dbiases[l] + o);
      for (; o < size; o++)
        for (long r = 0; r < rows; r++) dbiases[l][o] += dz[r * size + o];
      if (l) {
        float* before = own + l % 2 * room;
        product(rows, in, size, View{dz, size, 1}, weights[l], in, Differentiated{a, before, in, net.kind});
        dz = before;
      }
    }
  }
}

// Numbers that the work of `input_rows` on a tile needs.
inline long input_room(const Network& net) { return 2 * TILE * std::max(net.widest(), Network::up(net.sizes[0])); }

// The gradient of the rows [begin, end) of x; `padded` has the first weights [out, up(in)] and zeros [up(in)].
void input_rows(const Network& net, long begin, long end, const float* doutput, const float* const* hidden,
                const float* const* weights, const float* padded, float* dx, float* own) {
  const long layers = net.layers(), inputs = net.sizes[0], ld = Network::up(inputs), room = input_room(net) / 2;
  for (long first = begin; first < end; first += TILE) {
    const long rows = std::min(TILE, end - first);
    const float* dz = doutput + first * net.sizes[layers];
    for (long l = layers - 1; l > 0; l--) {
      const long in = net.sizes[l], size = net.sizes[l + 1];
      float* before = own + l % 2 * room;
      const Differentiated result{hidden[l - 1] + first * in, before, in, net.kind};
      product(rows, in, size, View{dz, size, 1}, weights[l], in, result);
      dz = before;
    }
    float* y = own;  // dz is in the other half: the last l was 1
    product(rows, ld, net.sizes[1], View{dz, net.sizes[1], 1}, padded, ld, Activated{padded + net.sizes[1] * ld, y, ld, LINEAR});
    for (long r = 0; r < rows; r++) std::memcpy(dx + (first + r) * inputs, y + r * ld, sizeof(float) * inputs);
  }
}

// --- Operators -----------------------------------------------------------------------------------------------------

std::vector<Tensor> tensors(const StableIValue* stack, uint64_t count) {
  std::vector<Tensor> found;
  for (uint64_t i = 0; i < count; i++) {
    found.push_back(torch::stable::detail::to<Tensor>(stack[i]));
    STD_TORCH_CHECK(found.back().is_contiguous(), "argument ", i, " of a torchpod::mlp operator must be contiguous");
  }
  return found;
}

float* data(const Tensor& x) { return static_cast<float*>(x.mutable_data_ptr()); }

Tensor empty(std::vector<int64_t> sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (long i = static_cast<long>(sizes.size()) - 2; i >= 0; i--) strides[i] = strides[i + 1] * sizes[i + 1];
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(),
                                                  aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

// With the axis of networks, where there is one.
std::vector<int64_t> shape(bool many, long networks, std::vector<int64_t> rest) {
  if (many) rest.insert(rest.begin(), networks);
  return rest;
}

// Threads for so many rows; two are not worth waking for less than a millisecond's work.
int threads_for(long rows) { return static_cast<int>(std::clamp(rows / 512, 1l, static_cast<long>(omp_get_max_threads()))); }

// (x, weight, bias, weight, bias, ..., activation) -> (output) or (output, hidden, ...)
void forward(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs) {
  const std::vector<Tensor> in = tensors(stack, num_inputs - 1);
  const auto kind = static_cast<Activation>(torch::stable::detail::to<int64_t>(stack[num_inputs - 1]));
  const Tensor& x = in[0];
  const bool many = x.dim() == 3;
  const long networks = many ? x.size(0) : 1, rows = x.size(-2), layers = (in.size() - 1) / 2;
  Network net{{x.size(-1)}, kind, rows};
  for (long l = 0; l < layers; l++) net.sizes.push_back(in[1 + 2 * l].size(-2));
  std::vector<Tensor> made{empty(shape(many, networks, {rows, net.sizes[layers]}))};
  for (uint64_t l = 1; l < num_outputs; l++) made.push_back(empty(shape(many, networks, {rows, net.sizes[l]})));

  const long room = net.room(), size = packed_size(net);
  auto of_network = [&](long p, long first) {  // weights (0) or biases (1)
    std::array<const float*, MOST_LAYERS> pointers;
    for (long l = 0; l < layers; l++)
      pointers[l] = data(in[1 + 2 * l + first]) + p * net.sizes[l + 1] * (first ? 1 : net.sizes[l]);
    return pointers;
  };
  auto run = [&](long p, long begin, long end, const float* packed, float* own) {
    std::array<float*, MOST_LAYERS> hidden;
    for (uint64_t l = 1; l < num_outputs; l++) hidden[l - 1] = data(made[l]) + p * rows * net.sizes[l];
    forward_rows(net, begin, end, data(x) + p * rows * net.sizes[0], of_network(p, 0).data(), packed,
                 data(made[0]) + p * rows * net.sizes[layers], num_outputs > 1 ? hidden.data() : nullptr, own);
  };
  auto packed = [&](long p, float* to) {
    pack(net, of_network(p, 0).data(), of_network(p, 1).data(), to);
    return to;
  };
  const int threads = threads_for(networks * rows);
  if (threads == 1) {
    float* own = scratch(size + room);
    for (long p = 0; p < networks; p++) run(p, 0, rows, packed(p, own + room), own);
  } else if (networks > 1) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long p = 0; p < networks; p++) {
      float* own = scratch(size + room);
      run(p, 0, rows, packed(p, own + room), own);
    }
  } else {
    const float* shared = packed(0, scratch(size + room) + room);
    const long share = (rows + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; t++)
      run(0, std::min(t * share, rows), std::min((t + 1) * share, rows), shared, scratch(size + room));
  }
  for (uint64_t i = 0; i < num_outputs; i++) stack[i] = torch::stable::detail::from(made[i]);
}

// (doutput, x, hidden, ..., weight, ..., activation) -> (dweight, dbias, dweight, dbias, ...)
void backward(StableIValue* stack, uint64_t num_inputs, uint64_t num_outputs) {
  const std::vector<Tensor> in = tensors(stack, num_inputs - 1);
  const auto kind = static_cast<Activation>(torch::stable::detail::to<int64_t>(stack[num_inputs - 1]));
  const long layers = num_outputs / 2;
  const Tensor &doutput = in[0], &x = in[1];
  const bool many = x.dim() == 3;
  const long networks = many ? x.size(0) : 1, rows = x.size(-2);
  Network net{{}, kind, rows};
  for (long l = 0; l < layers; l++) net.sizes.push_back(in[1 + l].size(-1));
  net.sizes.push_back(doutput.size(-1));
  std::vector<Tensor> made;
  for (long l = 0; l < layers; l++) {
    made.push_back(empty(shape(many, networks, {net.sizes[l + 1], net.sizes[l]})));
    made.push_back(empty(shape(many, networks, {net.sizes[l + 1]})));
  }

  long gradients = 0;
  for (long l = 0; l < layers; l++) gradients += (net.sizes[l] + 1) * net.sizes[l + 1];
  const long room = net.room();
  // Sums the gradients of some rows, layer by layer, in the results; or in `to`, if given, or where they are flipped.
  auto add = [&](long p, long begin, long end, float* to, float* own) {
    std::vector<const float*> hidden, weights;
    std::vector<float*> dweights, dbiases;
    const bool direct = to == nullptr;
    float* const room_for_flipped = own + net.room();
    for (long l = 0; l < layers; l++) {
      const long inputs = net.sizes[l], size = net.sizes[l + 1];
      if (l) hidden.push_back(data(in[1 + l]) + p * rows * inputs);
      // The first weights are not needed: nothing is differentiated with respect to x.
      weights.push_back(l ? data(in[layers + l]) + p * inputs * size : nullptr);
      if (direct) {
        dweights.push_back(l == 0 && flipped(net) ? room_for_flipped : data(made[2 * l]) + p * inputs * size);
        dbiases.push_back(data(made[2 * l + 1]) + p * size);
      } else {
        dweights.push_back(to);
        dbiases.push_back(to + inputs * size);
        to += (inputs + 1) * size;
      }
      std::fill(dweights[l], dweights[l] + inputs * size, 0.0f);
      std::fill(dbiases[l], dbiases[l] + size, 0.0f);
    }
    backward_rows(net, begin, end, data(x) + p * rows * net.sizes[0], data(doutput) + p * rows * net.sizes[layers],
                  hidden.data(), weights.data(), dweights.data(), dbiases.data(), own);
    if (direct && flipped(net))
      transpose(net.sizes[0], net.sizes[1], room_for_flipped, data(made[0]) + p * net.sizes[0] * net.sizes[1], net.sizes[0]);
  };
  // Of one network, whose rows were shared out.
  auto write = [&](const float* from) {
    for (long l = 0; l < layers; l++) {
      const long inputs = net.sizes[l], size = net.sizes[l + 1];
      float* dweight = data(made[2 * l]);
      if (l == 0 && flipped(net)) {
        transpose(inputs, size, from, dweight, inputs);
      } else {
        std::memcpy(dweight, from, sizeof(float) * inputs * size);
      }
      from += inputs * size;
      std::memcpy(data(made[2 * l + 1]), from, sizeof(float) * size);
      from += size;
    }
  };
  const int threads = threads_for(networks * rows);
  if (threads == 1 || networks > 1) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (long p = 0; p < networks; p++) add(p, 0, rows, nullptr, scratch(room + net.sizes[0] * net.sizes[1]));
  } else {
    const long share = (rows + threads - 1) / threads;
    std::vector<float> parts(threads * gradients);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int t = 0; t < threads; t++)
      add(0, std::min(t * share, rows), std::min((t + 1) * share, rows), parts.data() + t * gradients, scratch(room));
    for (long i = gradients; i < threads * gradients; i++) parts[i % gradients] += parts[i];
    write(parts.data());
  }
  for (uint64_t i = 0; i < num_outputs; i++) stack[i] = torch::stable::detail::from(made[i]);
}

// (doutput, hidden, ..., weight, weight, ..., activation) -> dx
void input_gradient(StableIValue* stack, uint64_t num_inputs, uint64_t) {
  const std::vector<Tensor> in = tensors(stack, num_inputs - 1);
  const auto kind = static_cast<Activation>(torch::stable::detail::to<int64_t>(stack[num_inputs - 1]));
  const long layers = in.size() / 2;
  const Tensor& doutput = in[0];
  const bool many = doutput.dim() == 3;
  const long networks = many ? doutput.size(0) : 1, rows = doutput.size(-2);
  Network net{{}, kind, rows};
  for (long l = 0; l < layers; l++) net.sizes.push_back(in[layers + l].size(-1));
  net.sizes.push_back(doutput.size(-1));
  const Tensor dx = empty(shape(many, networks, {rows, net.sizes[0]}));
  const long inputs = net.sizes[0], size = net.sizes[1], ld = Network::up(inputs);
  const long room = input_room(net);

  auto run = [&](long p, long begin, long end, float* own) {
    std::array<const float*, MOST_LAYERS> hidden, weights;
    for (long l = 0; l < layers; l++) {
      if (l) hidden[l - 1] = data(in[l]) + p * rows * net.sizes[l];
      weights[l] = data(in[layers + l]) + p * net.sizes[l] * net.sizes[l + 1];
    }
    float* padded = own + room;
    std::fill(padded, padded + (size + 1) * ld, 0.0f);
    for (long o = 0; o < size; o++) std::memcpy(padded + o * ld, weights[0] + o * inputs, sizeof(float) * inputs);
    input_rows(net, begin, end, data(doutput) + p * rows * net.sizes[layers], hidden.data(), weights.data(), padded,
               data(dx) + p * rows * inputs, own);
  };
  const int threads = threads_for(networks * rows);
  const long share = networks > 1 ? rows : (rows + threads - 1) / threads, parts = networks > 1 ? networks : threads;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (long i = 0; i < parts; i++) {
    const long begin = networks > 1 ? 0 : std::min(i * share, rows);
    run(networks > 1 ? i : 0, begin, std::min(begin + share, rows), scratch(room + (size + 1) * ld));
  }
  stack[0] = torch::stable::detail::from(dx);
}

}  // namespace

// The schemas, one per number of layers, are defined in mlp.py.
STABLE_TORCH_LIBRARY_IMPL(torchpod, CPU, m) {
  for (const char* name : {"mlp2", "mlp3", "mlp4"}) m.impl(name, &forward);
  for (const char* name : {"mlp2_kept", "mlp3_kept", "mlp4_kept"}) m.impl(name, &forward);
  for (const char* name : {"mlp2_backward", "mlp3_backward", "mlp4_backward"}) m.impl(name, &backward);
  for (const char* name : {"mlp2_dx", "mlp3_dx", "mlp4_dx"}) m.impl(name, &input_gradient);
}
