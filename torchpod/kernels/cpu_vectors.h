// What ATen's vectors and inductor's headers do better so; together.py puts it in front of inductor's programs, and has
// them call `loadu`, `store` and `mask_from` of these.

#if INDUCTOR_USE_VECTOR_TYPES()
namespace torchpod {

// `V::loadu(p, count)`, but less than a whole vector.
template <class V>
struct Part {
  static V loadu(const void* p, int64_t count) { return V::loadu(p, count); }
};

// Of integers on AVX2, ATen takes whole vectors through the stack as well, in halves that wait for each other.
template <class V>
inline V loadu(const void* p, int64_t count = V::size()) {
  return count >= V::size() ? V::loadu(p) : Part<V>::loadu(p, count);
}

template <class T, int N>
struct Part<at::vec::VectorizedN<T, N>> {
  static at::vec::VectorizedN<T, N> loadu(const void* p, int64_t count) {
    using V = at::vec::Vectorized<T>;
    at::vec::VectorizedN<T, N> result;
#pragma GCC unroll 8
    for (int i = 0; i < N; i++, count -= V::size())
      result[i] = count > 0 ? torchpod::loadu<V>(static_cast<const T*>(p) + i * V::size(), count) : V(1);
    return result;
  }
};

template <class V, class T>
inline void store(V v, T* p, int64_t count = V::size()) {
  v.store(p, count);
}

template <class M, class... Args>
inline M mask_from(Args... args) {
  return M::from(args...);
}

// Masks and bools: else byte by byte through the stack, with a branch for each.
using Lanes = at::vec::Vectorized<int32_t>;
typedef int32_t Words __attribute__((vector_size(4 * Lanes::size())));
typedef int8_t Bytes __attribute__((vector_size(Lanes::size())));

template <class M, class B>
  requires(M::size() == Lanes::size() && std::is_same_v<std::remove_const_t<B>, bool>)
inline M mask_from(B* p, int64_t count) {
  Bytes bytes{};
  std::memcpy(&bytes, p, std::min<int64_t>(count, Lanes::size()));
  const Words words = __builtin_convertvector(bytes, Words) != 0;
  const at::vec::VecMask<int32_t, 1> mask(Lanes::loadu(&words));
  return [&]<class T, int N>(std::type_identity<at::vec::VecMask<T, N>>) {
    return mask.template cast<T, N>();
  }(std::type_identity<M>{});
}

template <class T, int N>
  requires(at::vec::VecMask<T, N>::size() == Lanes::size())
inline void store(at::vec::VecMask<T, N> v, bool* p, int64_t count = Lanes::size()) {
  Words words;
  v.template cast<int32_t, 1>()[0].store(&words);
  const Bytes bytes = __builtin_convertvector(words, Bytes) & 1;
  std::memcpy(p, &bytes, std::min<int64_t>(count, Lanes::size()));
}

}  // namespace torchpod

#ifdef CPU_CAPABILITY_AVX2
namespace torchpod {

// A store with a mask takes dozens of steps on many processors, and a load with one waits for stores smaller than it.
inline __m128 less_than_four(const float* p, int64_t count) {
  double both = 0;  // copied: for compilers, what is read as a double is not what was written as floats
  if (count & 2) std::memcpy(&both, p, sizeof both);
  const __m128 two = _mm_castpd_ps(_mm_set_sd(both));
  if (!(count & 1)) return two;
  const __m128 one = _mm_load_ss(p + (count & 2));
  return count & 2 ? _mm_movelh_ps(two, one) : one;
}

template <>
struct Part<at::vec::Vectorized<float>> {
  static at::vec::Vectorized<float> loadu(const void* from, int64_t count) {
    const auto p = static_cast<const float*>(from);
    if (count < 4) return _mm256_zextps128_ps256(less_than_four(p, count));
    return _mm256_set_m128(less_than_four(p + 4, count - 4), _mm_loadu_ps(p));
  }
};

// What is not loaded is 1, as with ATen, for somebody may divide by it.
template <>
struct Part<at::vec::Vectorized<int32_t>> {
  static at::vec::Vectorized<int32_t> loadu(const void* p, int64_t count) {
    const __m256i few = _mm256_set1_epi32(static_cast<int>(count));
    const __m256i mask = _mm256_cmpgt_epi32(few, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return _mm256_blendv_epi8(_mm256_set1_epi32(1), _mm256_maskload_epi32(static_cast<const int*>(p), mask), mask);
  }
};

template <>
struct Part<at::vec::Vectorized<int64_t>> {
  static at::vec::Vectorized<int64_t> loadu(const void* p, int64_t count) {
    const __m256i mask = _mm256_cmpgt_epi64(_mm256_set1_epi64x(count), _mm256_setr_epi64x(0, 1, 2, 3));
    const __m256i there = _mm256_maskload_epi64(static_cast<const long long*>(p), mask);
    return _mm256_blendv_epi8(_mm256_set1_epi64x(1), there, mask);
  }
};

inline void store(at::vec::Vectorized<float> v, float* p, int64_t count = 8) {
  if (count >= 8) return _mm256_storeu_ps(p, v);
  __m128 left = _mm256_castps256_ps128(v);
  if (count & 4) {
    _mm_storeu_ps(p, left);
    left = _mm256_extractf128_ps(v, 1);
    p += 4;
  }
  if (count & 2) {
    _mm_storel_pi(reinterpret_cast<__m64*>(p), left);
    left = _mm_movehl_ps(left, left);
    p += 2;
  }
  if (count & 1) _mm_store_ss(p, left);
}

}  // namespace torchpod

// Number by number in the header, for want of a transposition of any [M, N].
template <>
struct transpose_mxn_helper<float, false> {
  static void call(const float* src, int64_t ld_src, float* dst, int64_t ld_dst, int M, int N) {
    using V = at::vec::Vectorized<float>;
    for (int i = 0; i < M; i += 8)
      for (int j = 0; j < N; j += 8) {
        const int rows = std::min(8, M - i), columns = std::min(8, N - j);
        at::vec::VectorizedN<float, 8> block;
#pragma GCC unroll 8
        for (int r = 0; r < 8; r++)
          block[r] = r < rows ? torchpod::loadu<V>(src + (i + r) * ld_src + j, columns) : V(0.0f);
        at::vec::transpose_block(block);
#pragma GCC unroll 8
        for (int c = 0; c < 8; c++)
          if (c < columns) torchpod::store(block[c], dst + (j + c) * ld_dst + i, rows);
      }
  }
};

// For want of an instruction number by number, or in many steps. No templates, so that they come before ATen's.
namespace at::vec {

inline Vectorized<int64_t> operator*(const Vectorized<int64_t>& a, const Vectorized<int64_t>& b) {
  const __m256i upper = _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(a, 32), b),
                                         _mm256_mul_epu32(a, _mm256_srli_epi64(b, 32)));
  return _mm256_add_epi64(_mm256_mul_epu32(a, b), _mm256_slli_epi64(upper, 32));
}

// By 64 and more, and by less than 0, only the sign is left: as ATen's.
inline Vectorized<int64_t> operator>>(const Vectorized<int64_t>& a, const Vectorized<int64_t>& b) {
  const __m256i negative = _mm256_cmpgt_epi64(_mm256_setzero_si256(), a);
  return _mm256_xor_si256(_mm256_srlv_epi64(_mm256_xor_si256(a, negative), b), negative);
}

}  // namespace at::vec
#endif
#endif
