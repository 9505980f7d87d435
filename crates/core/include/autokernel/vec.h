// Vector maths for CPU kernels: one register of f32 (`vf`) or f64 (`vd`) at a time, on compiler vector extensions.
#pragma once
#include <stdint.h>
#if defined(__x86_64__)
// Keeps <stdlib.h> out: its std::abs would collide with ours under `using namespace ak`.
#define _MM_MALLOC_H_INCLUDED
#define __MM_MALLOC_H
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define AK_FN static inline __attribute__((always_inline, unused))

namespace ak {

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define AK_AVX512 1
constexpr int VEC_BYTES = 64;
#elif defined(__AVX2__)
#define AK_AVX2 1
constexpr int VEC_BYTES = 32;
#else
constexpr int VEC_BYTES = 16;
#endif
#if defined(__FMA__) || defined(__aarch64__)
#define AK_FMA 1
#endif
constexpr int LANES = VEC_BYTES / 4;
constexpr int DLANES = VEC_BYTES / 8;

typedef float vf __attribute__((vector_size(VEC_BYTES)));
typedef double vd __attribute__((vector_size(VEC_BYTES)));
typedef int32_t mf __attribute__((vector_size(VEC_BYTES)));
typedef int64_t md __attribute__((vector_size(VEC_BYTES)));
typedef uint32_t uf __attribute__((vector_size(VEC_BYTES)));
typedef uint64_t ud __attribute__((vector_size(VEC_BYTES)));
typedef float vh __attribute__((vector_size(VEC_BYTES / 2)));  // half a register of f32: as many lanes as vd

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

template <class T, class U> struct same { static constexpr bool value = false; };
template <class T> struct same<T, T> { static constexpr bool value = true; };
template <class T, class U> constexpr bool is = same<T, U>::value;

// What a lane type is made of. The maths below is written once for vectors and for scalars.
template <class F> struct lane;
template <> struct lane<vf> { typedef float E; typedef mf I; typedef uf U; static constexpr int N = LANES; };
template <> struct lane<vd> { typedef double E; typedef md I; typedef ud U; static constexpr int N = DLANES; };
template <> struct lane<float> { typedef float E; typedef int32_t I; typedef uint32_t U; static constexpr int N = 1; };
template <> struct lane<double> { typedef double E; typedef int64_t I; typedef uint64_t U; static constexpr int N = 1; };

template <class To, class From> AK_FN To bit_cast(From x) { return __builtin_bit_cast(To, x); }

#if defined(AK_AVX512)
#define AK_SEQ_F 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#define AK_SEQ_D 0, 1, 2, 3, 4, 5, 6, 7
#define AK_SEQ_HI 8, 9, 10, 11, 12, 13, 14, 15
#elif defined(AK_AVX2)
#define AK_SEQ_F 0, 1, 2, 3, 4, 5, 6, 7
#define AK_SEQ_D 0, 1, 2, 3
#define AK_SEQ_HI 4, 5, 6, 7
#else
#define AK_SEQ_F 0, 1, 2, 3
#define AK_SEQ_D 0, 1
#define AK_SEQ_HI 2, 3
#endif
AK_FN mf iota_f() { return mf{AK_SEQ_F}; }
AK_FN md iota_d() { return md{AK_SEQ_D}; }

// x - 0 and not x + 0: only the former keeps -0, and so folds away.
AK_FN vf splat(float x) { return x - vf{}; }
AK_FN vd splat(double x) { return x - vd{}; }
template <class F> AK_FN F all_of(typename lane<F>::E x) {
    if constexpr (lane<F>::N == 1) return x;
    else return splat(x);
}

// ---- halves: vf <-> two vd ----
AK_FN vf concat(vh lo, vh hi) { return __builtin_shufflevector(lo, hi, AK_SEQ_F); }
AK_FN vh low(vf x) { return __builtin_shufflevector(x, x, AK_SEQ_D); }
AK_FN vh high(vf x) { return __builtin_shufflevector(x, x, AK_SEQ_HI); }
AK_FN vd widen(vh x) { return __builtin_convertvector(x, vd); }
AK_FN vd widen_lo(vf x) { return widen(low(x)); }
AK_FN vd widen_hi(vf x) { return widen(high(x)); }
AK_FN vh narrow(vd x) { return __builtin_convertvector(x, vh); }
AK_FN vf narrow(vd lo, vd hi) { return concat(narrow(lo), narrow(hi)); }

// ---- selection, comparison helpers ----
AK_FN vf select(mf m, vf a, vf b) { return m ? a : b; }
AK_FN vd select(md m, vd a, vd b) { return m ? a : b; }
AK_FN float select(bool m, float a, float b) { return m ? a : b; }
AK_FN double select(bool m, double a, double b) { return m ? a : b; }
AK_FN mf isnan(vf x) { return x != x; }
AK_FN md isnan(vd x) { return x != x; }
AK_FN bool isnan(float x) { return x != x; }
AK_FN bool isnan(double x) { return x != x; }
AK_FN bool any(bool m) { return m; }
AK_FN bool any(mf m) {
#if defined(AK_AVX512)
    return _mm512_movepi32_mask((__m512i)m) != 0;
#elif defined(AK_AVX2)
    return _mm256_movemask_ps((__m256)m) != 0;
#elif defined(__x86_64__)
    return _mm_movemask_ps((__m128)m) != 0;
#else
    int32_t r = 0;
    for (int i = 0; i < LANES; ++i) r |= m[i];
    return r != 0;
#endif
}
AK_FN bool any(md m) { return any((mf)m); }

// ---- memory ----
AK_FN void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
AK_FN void fence() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// N elements of T in one (unaligned) piece.
template <class T, int N> struct piece_of { typedef T type __attribute__((vector_size(N * sizeof(T)))); };
template <class T, int N> using piece = typename piece_of<T, N>::type;
template <class P> AK_FN P load_piece(const void* p) { P r; __builtin_memcpy(&r, p, sizeof(P)); return r; }
template <class P> AK_FN void store_piece(void* p, P x) { __builtin_memcpy(p, &x, sizeof(P)); }

AK_FN vf loadu(const float* p) { return load_piece<vf>(p); }
AK_FN vd loadu(const double* p) { return load_piece<vd>(p); }
AK_FN void storeu(float* p, vf x) { store_piece(p, x); }
AK_FN void storeu(double* p, vd x) { store_piece(p, x); }
AK_FN void stream(float* p, vf x) { *(vf*)p = x; }
AK_FN void stream(double* p, vd x) { *(vd*)p = x; }

template <class T> struct storage { typedef T type; };
template <> struct storage<bool> { typedef uint8_t type; };
template <> struct storage<bf16> { typedef uint16_t type; };
template <> struct storage<f16> { typedef uint16_t type; };

// ---- f16, bf16 ----
AK_FN float to_float(bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }
AK_FN bf16 to_bf16(float x) {
    uint32_t u = bit_cast<uint32_t>(x);
    uint32_t r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return bf16{uint16_t(x != x ? (u >> 16) | 0x40 : r)};
}
AK_FN float to_float(f16 x) {
    uint32_t m = uint32_t(x.bits & 0x7fff) << 13;
    float f = bit_cast<float>(m) * 0x1p112f;
    uint32_t u = bit_cast<uint32_t>(f) | (m >= 0x0f800000u ? 0x7f800000u : 0u);
    return bit_cast<float>(u | uint32_t(x.bits & 0x8000) << 16);
}
AK_FN f16 to_f16(float x) {
    uint32_t b = bit_cast<uint32_t>(x), u = b & 0x7fffffff, r;
    if (u > 0x7f800000u) r = 0x7e00 | ((u >> 13) & 0x3ff);
    else if (u >= 0x477ff000u) r = 0x7c00;
    else if (u >= 0x38800000u) r = (u + 0xfff + ((u >> 13) & 1) - (112u << 23)) >> 13;
    else r = bit_cast<uint32_t>(bit_cast<float>(u) + 0.5f) - bit_cast<uint32_t>(0.5f);
    return f16{uint16_t(r | ((b >> 16) & 0x8000))};
}
template <class E, class T> AK_FN E load_one(const T* p) {
    if constexpr (is<T, bf16> || is<T, f16>) return E(to_float(*p));
    else if constexpr (is<T, bool>) return E(*(const uint8_t*)p != 0);
    else return E(*p);
}
template <class E, class T> AK_FN void store_one(T* p, E x) {
    if constexpr (is<T, bf16>) *p = to_bf16(float(x));
    else if constexpr (is<T, f16>) *p = to_f16(float(x));
    else if constexpr (is<T, bool>) *p = x != 0;
    else if constexpr (sizeof(T) == 1) *p = T(int32_t(x));
    else *p = T(x);
}
template <class F, class T> AK_FN F load_partial_as(const T* p, int n) {
    typedef typename lane<F>::E E;
    if constexpr (lane<F>::N == 1) return n > 0 ? load_one<E>(p) : E(0);
    else {
        F r{};
        for (int i = 0; i < lane<F>::N; ++i) if (i < n) r[i] = load_one<E>(p + i);
        return r;
    }
}
template <class F, class T> AK_FN F load_as(const T* p) { return load_partial_as<F>(p, lane<F>::N); }
template <class F, class T> AK_FN void store_partial_from(T* p, F x, int n) {
    if constexpr (lane<F>::N == 1) { if (n > 0) store_one(p, x); }
    else { for (int i = 0; i < lane<F>::N; ++i) if (i < n) store_one(p + i, x[i]); }
}
template <class F, class T> AK_FN void store_from(T* p, F x) { store_partial_from(p, x, lane<F>::N); }
AK_FN vf load_partial(const float* p, int n) { return load_partial_as<vf>(p, n); }
AK_FN vd load_partial(const double* p, int n) { return load_partial_as<vd>(p, n); }
AK_FN void store_partial(float* p, vf x, int n) { store_partial_from(p, x, n); }
AK_FN void store_partial(double* p, vd x, int n) { store_partial_from(p, x, n); }
template <class F, class T> AK_FN F gather(const T* p, int64_t stride, int n) {
    F r{};
    for (int i = 0; i < lane<F>::N; ++i) if (i < n) r[i] = load_one<typename lane<F>::E>(p + i * stride);
    return r;
}
template <class F, class T> AK_FN void scatter(T* p, int64_t stride, F x, int n) {
    for (int i = 0; i < lane<F>::N; ++i) if (i < n) store_one(p + i * stride, x[i]);
}

// ---- maths ----
AK_FN float one_sigmoid(float x) { return 1.0f / (1.0f + __builtin_expf(-x)); }
AK_FN double one_sigmoid(double x) { return 1.0 / (1.0 + __builtin_exp(-x)); }
#define AK_UNARY(name, f32, f64)                                                              \
    AK_FN float name(float x) { return f32; }                                                 \
    AK_FN double name(double x) { return f64; }                                               \
    AK_FN vf name(vf x) { vf r{}; for (int i = 0; i < LANES; ++i) r[i] = name(x[i]); return r; } \
    AK_FN vd name(vd x) { vd r{}; for (int i = 0; i < DLANES; ++i) r[i] = name(x[i]); return r; }
#define AK_LIBM(name) AK_UNARY(name, __builtin_##name##f(x), __builtin_##name(x))
AK_UNARY(abs, __builtin_fabsf(x), __builtin_fabs(x))
AK_LIBM(sqrt) AK_LIBM(exp) AK_LIBM(expm1) AK_LIBM(log) AK_LIBM(log1p) AK_LIBM(tanh) AK_LIBM(erf) AK_LIBM(sin) AK_LIBM(cos)
AK_LIBM(floor) AK_LIBM(ceil) AK_LIBM(trunc)
AK_UNARY(round, __builtin_rintf(x), __builtin_rint(x))
AK_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x), 1.0 / __builtin_sqrt(x))
AK_UNARY(recip, 1.0f / x, 1.0 / x)
AK_UNARY(sigmoid, one_sigmoid(x), one_sigmoid(x))
#define AK_BINARY(F, M)                                                                       \
    AK_FN F max(F a, F b) { return select((a > b) | (a != a), a, b); }                        \
    AK_FN F min(F a, F b) { return select((a < b) | (a != a), a, b); }
AK_BINARY(vf, mf) AK_BINARY(vd, md) AK_BINARY(float, bool) AK_BINARY(double, bool)
AK_FN float pow(float a, float b) { return __builtin_powf(a, b); }
AK_FN double pow(double a, double b) { return __builtin_pow(a, b); }
AK_FN vf pow(vf a, vf b) { vf r{}; for (int i = 0; i < LANES; ++i) r[i] = pow(a[i], b[i]); return r; }
AK_FN vd pow(vd a, vd b) { vd r{}; for (int i = 0; i < DLANES; ++i) r[i] = pow(a[i], b[i]); return r; }
AK_FN vf fma(vf a, vf b, vf c) { return a * b + c; }
AK_FN vd fma(vd a, vd b, vd c) { return a * b + c; }
AK_FN float fma(float a, float b, float c) { return a * b + c; }
AK_FN double fma(double a, double b, double c) { return a * b + c; }

// ---- horizontal ----
template <class F, class Op> AK_FN typename lane<F>::E reduce(F x, Op op) {
    typename lane<F>::E a[lane<F>::N];
    __builtin_memcpy(a, &x, sizeof(x));
    for (int h = lane<F>::N / 2; h; h /= 2) for (int i = 0; i < h; ++i) a[i] = op(a[i], a[i + h]);
    return a[0];
}
#define AK_HORIZONTAL(F, E)                                                                   \
    AK_FN E hsum(F x) { return reduce(x, [](E a, E b) { return a + b; }); }                   \
    AK_FN E hmax(F x) { return reduce(x, [](E a, E b) { return max(a, b); }); }               \
    AK_FN E hmin(F x) { return reduce(x, [](E a, E b) { return min(a, b); }); }
AK_HORIZONTAL(vf, float) AK_HORIZONTAL(vd, double)

}  // namespace ak
