// The nearest others of agents on a CPU, as many agents at once as a vector has numbers; see ops/neighbors.py, whose
// rule this is, to the bit.

#include <omp.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#ifdef __AVX__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace {

using torch::stable::Tensor;

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

constexpr int64_t AT_LEAST = 1 << 20;  // distances for a thread of its own
constexpr float NOBODY = std::numeric_limits<float>::infinity();

inline Floats root(Floats x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX__)
  return (Floats)_mm256_sqrt_ps((__m256)x);
#else
  for (int i = 0; i < LANES; i++) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

inline bool any(Ints mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX__)
  return _mm256_movemask_ps((__m256)mask);
#else
  int32_t found = 0;
  for (int i = 0; i < LANES; i++) found |= mask[i];
  return found;
#endif
}

// Clamped, as it is there, where a square is infinite.
inline Floats square(Floats x) {
  const Floats y = x * x;
  return y > FLT_MAX ? Floats{} + FLT_MAX : y;  // not of NaN
}

struct Scratch {  // of one thread
  std::vector<float> x, y;
  std::vector<int32_t> id;
  std::vector<Floats> distance;
  std::vector<Ints> who;
};

// One environment: whoever looks at LANES agents at a time, everybody who is in the game in the order of the ids.
void search(const float* x, const float* y, const bool* alive, int64_t size, int64_t num, int64_t* who, bool* there,
            Scratch& s) {
  s.x.clear(), s.y.clear(), s.id.clear();
  for (int64_t j = 0; j < size; j++)
    if (alive[j]) s.x.push_back(x[j]), s.y.push_back(y[j]), s.id.push_back(static_cast<int32_t>(j));
  s.distance.resize(num), s.who.resize(num);
  for (int64_t first = 0; first < size; first += LANES) {
    const int lanes = static_cast<int>(std::min<int64_t>(LANES, size - first));
    Floats own_x{}, own_y{};
    Ints own_id{};
    for (int i = 0; i < LANES; i++) {
      own_x[i] = x[first + std::min(i, lanes - 1)], own_y[i] = y[first + std::min(i, lanes - 1)];
      own_id[i] = static_cast<int32_t>(first + i);
    }
    std::fill(s.distance.begin(), s.distance.end(), Floats{} + NOBODY);
    Floats bound = Floats{} + NOBODY;  // beyond it nobody is nearer than the last of those that were found
    for (size_t j = 0; j < s.id.size(); j++) {
      Floats distance = square(s.x[j] - own_x) + square(s.y[j] - own_y);
      if (s.id[j] >= first && s.id[j] < first + LANES) distance = own_id == s.id[j] ? Floats{} + NOBODY : distance;
      if (!any(distance < bound)) continue;
      distance = root(distance);
      Floats next = distance;
      Ints id = Ints{} + s.id[j];
      for (int64_t k = 0; k < num; k++) {  // behind those that are equally near, for their ids are smaller
        const Floats other = s.distance[k];
        const Ints other_id = s.who[k], nearer = distance < other;
        s.distance[k] = nearer ? next : other, next = nearer ? other : next;
        s.who[k] = nearer ? id : other_id, id = nearer ? other_id : id;
      }
      const Floats last = s.distance[num - 1];
      bound = last * last * 1.000001f + FLT_MIN;
    }
    for (int i = 0; i < lanes; i++)
      for (int64_t k = 0; k < num; k++) {
        const bool found = s.distance[k][i] < NOBODY;
        there[(first + i) * num + k] = found;
        who[(first + i) * num + k] = found ? s.who[k][i] : 0;
      }
  }
}

Tensor empty(const std::vector<int64_t>& sizes, int32_t dtype) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size() - 1; i > 0; i--) strides[i - 1] = strides[i] * sizes[i];
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(sizes.size(), sizes.data(), strides.data(), dtype,
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}

void nearest(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  const Tensor x = torch::stable::detail::to<Tensor>(stack[0]), y = torch::stable::detail::to<Tensor>(stack[1]);
  const Tensor alive = torch::stable::detail::to<Tensor>(stack[2]);
  const int64_t num = torch::stable::detail::to<int64_t>(stack[3]), batch = x.size(0), size = x.size(1);
  const Tensor who = empty({batch, size, num}, aoti_torch_dtype_int64());
  const Tensor there = empty({batch, size, num}, aoti_torch_dtype_bool());
  const auto xs = static_cast<const float*>(x.data_ptr()), ys = static_cast<const float*>(y.data_ptr());
  const auto alives = static_cast<const bool*>(alive.data_ptr());
  const auto ids = static_cast<int64_t*>(who.data_ptr());
  const auto found = static_cast<bool*>(there.data_ptr());
  const int64_t threads = std::clamp<int64_t>(batch * size * size / AT_LEAST, 1, omp_get_max_threads());
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    Scratch scratch;
#pragma omp for schedule(static)
    for (int64_t b = 0; b < batch; b++)
      search(xs + b * size, ys + b * size, alives + b * size, size, num, ids + b * size * num, found + b * size * num,
             scratch);
  }
  stack[0] = torch::stable::detail::from(who);
  stack[1] = torch::stable::detail::from(there);
}

}  // namespace

// The schema is defined in ops/neighbors.py.
STABLE_TORCH_LIBRARY_IMPL(torchpod, CPU, m) { m.impl("nearest", &nearest); }
