// y_t = x_t + decay_t y_{t+1} on a CPU, step by step; see ops/returns.py.

#include <omp.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>

namespace {

using torch::stable::Tensor;

constexpr int64_t AT_LEAST = 32768;  // numbers for a thread of its own

template <typename T>
void scan(const Tensor& x, const Tensor& decay, const Tensor& y) {
  const int64_t length = x.size(0), cols = length ? x.numel() / length : 0;
  const T* const xs = static_cast<const T*>(x.data_ptr());
  const T* const decays = static_cast<const T*>(decay.data_ptr());
  T* const ys = static_cast<T*>(y.data_ptr());
  const int64_t threads = std::clamp<int64_t>(x.numel() / AT_LEAST, 1, omp_get_max_threads());
  const int64_t share = (cols + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
  for (int64_t thread = 0; thread < threads; thread++) {
    const int64_t begin = std::min(thread * share, cols), end = std::min(begin + share, cols);
    for (int64_t t = length - 1; t >= 0; t--) {
      const int64_t row = t * cols, next = row + cols;
      if (t == length - 1) {
        std::copy(xs + row + begin, xs + row + end, ys + row + begin);
        continue;
      }
#pragma omp simd
      for (int64_t j = begin; j < end; j++) ys[row + j] = xs[row + j] + decays[row + j] * ys[next + j];
    }
  }
}

void discounted_sum(StableIValue* stack, uint64_t num_args, uint64_t num_outputs) {
  const Tensor x = torch::stable::detail::to<Tensor>(stack[0]), decay = torch::stable::detail::to<Tensor>(stack[1]);
  const bool single = x.element_size() == sizeof(float);
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(x.dim(), x.sizes().data(), x.strides().data(),
                                                  single ? aoti_torch_dtype_float32() : aoti_torch_dtype_float64(),
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  const Tensor y(handle);
  (single ? scan<float> : scan<double>)(x, decay, y);
  stack[0] = torch::stable::detail::from(y);
}

}  // namespace

// The schema is defined in ops/returns.py.
STABLE_TORCH_LIBRARY_IMPL(torchpod, CPU, m) { m.impl("discounted_sum", &discounted_sum); }
