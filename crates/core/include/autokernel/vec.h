// Vector maths for CPU kernels, on compiler vector extensions (GCC 12, clang 15 and later).
//
// `vf` is one register of f32 and `vd` one of f64, so a `vd` has half the lanes. Comparisons of them with the
// plain operators give the masks `mf` and `md` (all bits set where true) that `select` takes. Every function of
// the maths part also takes a scalar float or double and runs the same code on it. Kernels are leaf code: there
// is no state here, no constructor, and nothing is called but libm (where the table below says so).
//
// A width without AVX-512 or AVX2 is 16 bytes: SSE2 on x86-64, NEON on aarch64. Code for one instruction set
// stands only in the functions marked "island".
//
// Worst error in ulp against a wider libm, as `tests/vec_header.rs` measures it (which also asserts it):
//
//            f32    f64    method
//   exp      1.14   1.06   2^n e^r, |r| <= ln2/2, polynomial of degree 6 (f64: 11)
//   expm1    1.38   1.78   2^n (e^r - 1) + (2^n - 1), degree 7 (13)
//   log      0.91   0.81   f32: polynomial in m - 1 on [0.75, 1.5), degree 10; f64: atanh series in f / (2 + f)
//   log1p    0.92   0.78   as log, with f = (1 + x) 2^-k - 1 formed from x itself
//   tanh     1.50   2.35   e / (e + 2), e = expm1(2|x|); in f32 an odd polynomial of degree 11 below 0.55
//   sigmoid  2.26   1.99   by e^-|x|; relative accuracy also where it is small
//   erf      1.56   libm   eight intervals of degree 6, picked by a shuffle; f64 lane by lane in libm
//   sin      1.53   libm   pi/2 in three parts up to 2^20, then degree 7; f32 beyond and f64: libm, lane by lane
//   cos      1.55   libm   the same, degree 8
//   pow      0.51   libm   e^(y log x) in f64; f64 lane by lane in libm
//   rsqrt    1.48   1.47   1 / sqrt(x), as torch does it; recip and sqrt are exact to rounding
//
// All are right at 0, -0, inf, NaN and for denormal arguments and results (the sign of zero included).
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
#define AK_MEMBER inline __attribute__((always_inline))
#define AK_COLD static __attribute__((noinline, cold, unused))

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
typedef decltype(vf{} < vf{}) mf;  // of int32_t; compilers differ in which 64-bit type `md` is made of
typedef decltype(vd{} < vd{}) md;
typedef float vh __attribute__((vector_size(VEC_BYTES / 2)));  // half a register of f32: as many lanes as vd

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

namespace detail {
template <class T, class U> constexpr bool is = false;
template <class T> constexpr bool is<T, T> = true;

// What a lane type is made of; with it the maths is written once for vectors and scalars.
template <class F> struct lane;
template <> struct lane<vf> { typedef float E; typedef mf I; static constexpr int N = LANES; };
template <> struct lane<vd> { typedef double E; typedef md I; static constexpr int N = DLANES; };
template <> struct lane<float> { typedef float E; typedef int32_t I; static constexpr int N = 1; };
template <> struct lane<double> { typedef double E; typedef int64_t I; static constexpr int N = 1; };

template <class To, class From> AK_FN To bit_cast(From x) { return __builtin_bit_cast(To, x); }
template <class F> AK_FN typename lane<F>::I bits(F x) { return bit_cast<typename lane<F>::I>(x); }
template <class F> AK_FN F from_bits(typename lane<F>::I x) { return bit_cast<F>(x); }

template <int... I> struct list {};
#if defined(__clang__)
template <class T, T... I> struct to_list { typedef list<I...> type; };
template <int N> using upto = typename __make_integer_seq<to_list, int, N>::type;
#else
template <int N> using upto = list<__integer_pack(N)...>;
#endif

// N elements of T in one vector; memory is reached through memcpy, so alignment and aliasing never matter.
template <class T, int N> struct piece_of { typedef T type __attribute__((vector_size(N * sizeof(T)))); };
template <class T, int N> using piece = typename piece_of<T, N>::type;
template <class P> AK_FN P load_piece(const void* p) { P r; __builtin_memcpy(&r, p, sizeof(P)); return r; }
template <class P> AK_FN void store_piece(void* p, P x) { __builtin_memcpy(p, &x, sizeof(P)); }

template <int AT, class V, int... I> AK_FN auto pick(V x, list<I...>) { return __builtin_shufflevector(x, x, (AT + I)...); }
template <class V, int... I> AK_FN auto join(V a, V b, list<I...>) { return __builtin_shufflevector(a, b, I...); }
template <int... I> AK_FN mf iota(list<I...>) { return mf{I...}; }
}  // namespace detail
using detail::lane;

// ---- making, choosing, halving ----
// x - 0 and not x + 0: only the former keeps -0, and so folds away.
AK_FN vf splat(float x) { return x - vf{}; }
AK_FN vd splat(double x) { return x - vd{}; }
template <class F> AK_FN F all_of(typename lane<F>::E x) {
    if constexpr (lane<F>::N == 1) return x;
    else return splat(x);
}
AK_FN vf select(mf m, vf a, vf b) { return m ? a : b; }
AK_FN vd select(md m, vd a, vd b) { return m ? a : b; }
AK_FN float select(bool m, float a, float b) { return m ? a : b; }
AK_FN double select(bool m, double a, double b) { return m ? a : b; }

AK_FN vh low(vf x) { return detail::pick<0>(x, detail::upto<DLANES>{}); }
AK_FN vh high(vf x) { return detail::pick<DLANES>(x, detail::upto<DLANES>{}); }
AK_FN vf concat(vh lo, vh hi) { return detail::join(lo, hi, detail::upto<LANES>{}); }
AK_FN vd widen(vh x) { return __builtin_convertvector(x, vd); }
AK_FN vh narrow(vd x) { return __builtin_convertvector(x, vh); }
AK_FN vd widen_lo(vf x) { return widen(low(x)); }
AK_FN vd widen_hi(vf x) { return widen(high(x)); }
AK_FN vf narrow(vd lo, vd hi) { return concat(narrow(lo), narrow(hi)); }

// ---- islands ----
// With AVX-512 they use the zero-masked forms, all lanes on: GCC 12 warns about the plain ones, and makes the same code.
AK_FN bool any(bool m) { return m; }
AK_FN bool any(mf m) {
#if defined(AK_AVX512)
    return _mm512_movepi32_mask((__m512i)m) != 0;
#elif defined(AK_AVX2)
    return _mm256_movemask_ps((__m256)m) != 0;
#elif defined(__x86_64__)
    return _mm_movemask_ps((__m128)m) != 0;
#else
    return vmaxvq_u32((uint32x4_t)m) != 0;
#endif
}
AK_FN bool any(md m) { return any((mf)m); }

// One rounding where the machine has the instruction, two where it has not.
AK_FN float fma(float a, float b, float c) {
#if defined(AK_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}
AK_FN double fma(double a, double b, double c) {
#if defined(AK_FMA)
    return __builtin_fma(a, b, c);
#else
    return a * b + c;
#endif
}
AK_FN float sqrt(float x) { return __builtin_sqrtf(x); }
AK_FN double sqrt(double x) { return __builtin_sqrt(x); }

#if defined(AK_AVX512)
AK_FN vf fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
AK_FN vd fma(vd a, vd b, vd c) { return (vd)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c); }
AK_FN vf sqrt(vf x) { return (vf)_mm512_maskz_sqrt_ps(0xffff, (__m512)x); }
AK_FN vd sqrt(vd x) { return (vd)_mm512_maskz_sqrt_pd(0xff, (__m512d)x); }
AK_FN void stream(float* p, vf x) { _mm512_stream_ps(p, (__m512)x); }
AK_FN void stream(double* p, vd x) { _mm512_stream_pd(p, (__m512d)x); }
#define AK_ROUND(name, imm, scalar)                                                     \
    AK_FN vf name(vf x) { return (vf)_mm512_maskz_roundscale_ps(0xffff, (__m512)x, imm | 8); }        \
    AK_FN vd name(vd x) { return (vd)_mm512_maskz_roundscale_pd(0xff, (__m512d)x, imm | 8); }
#elif defined(AK_AVX2)
#if defined(AK_FMA)
AK_FN vf fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
AK_FN vd fma(vd a, vd b, vd c) { return (vd)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c); }
#endif
AK_FN vf sqrt(vf x) { return (vf)_mm256_sqrt_ps((__m256)x); }
AK_FN vd sqrt(vd x) { return (vd)_mm256_sqrt_pd((__m256d)x); }
AK_FN void stream(float* p, vf x) { _mm256_stream_ps(p, (__m256)x); }
AK_FN void stream(double* p, vd x) { _mm256_stream_pd(p, (__m256d)x); }
#define AK_ROUND(name, imm, scalar)                                                     \
    AK_FN vf name(vf x) { return (vf)_mm256_round_ps((__m256)x, imm | 8); }             \
    AK_FN vd name(vd x) { return (vd)_mm256_round_pd((__m256d)x, imm | 8); }
#elif defined(__x86_64__)
#if defined(AK_FMA)
AK_FN vf fma(vf a, vf b, vf c) { return (vf)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c); }
AK_FN vd fma(vd a, vd b, vd c) { return (vd)_mm_fmadd_pd((__m128d)a, (__m128d)b, (__m128d)c); }
#endif
AK_FN vf sqrt(vf x) { return (vf)_mm_sqrt_ps((__m128)x); }
AK_FN vd sqrt(vd x) { return (vd)_mm_sqrt_pd((__m128d)x); }
AK_FN void stream(float* p, vf x) { _mm_stream_ps(p, (__m128)x); }
AK_FN void stream(double* p, vd x) { _mm_stream_pd(p, (__m128d)x); }
#else
AK_FN vf fma(vf a, vf b, vf c) { return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
AK_FN vd fma(vd a, vd b, vd c) { return (vd)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b); }
AK_FN vf sqrt(vf x) { return (vf)vsqrtq_f32((float32x4_t)x); }
AK_FN vd sqrt(vd x) { return (vd)vsqrtq_f64((float64x2_t)x); }
AK_FN void stream(float* p, vf x) { *(vf*)p = x; }
AK_FN void stream(double* p, vd x) { *(vd*)p = x; }
#define AK_ROUND(name, imm, arm)                                                        \
    AK_FN vf name(vf x) { return (vf)arm##q_f32((float32x4_t)x); }                      \
    AK_FN vd name(vd x) { return (vd)arm##q_f64((float64x2_t)x); }
#endif
#if !defined(AK_FMA)
AK_FN vf fma(vf a, vf b, vf c) { return a * b + c; }
AK_FN vd fma(vd a, vd b, vd c) { return a * b + c; }
#endif
// Orders streamed stores before what follows. Needed once, after the last `stream` of a thread.
AK_FN void fence() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}
AK_FN void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }

// ---- signs, rounding, order ----
namespace detail {
template <class F> constexpr typename lane<F>::E SIGN = -0.0f;
template <class F> AK_FN typename lane<F>::I sign_of(F x) { return bits(x) & bits(all_of<F>(SIGN<F>)); }
template <class F> AK_FN F magnitude(F x) { return from_bits<F>(bits(x) & ~bits(all_of<F>(SIGN<F>))); }
template <class F> AK_FN F with_sign(F magnitude_of, F sign) { return from_bits<F>(bits(magnitude_of) | sign_of(sign)); }

// Adding 2^23 (2^52) drops the fraction: for where there is no rounding instruction (SSE2).
template <class F> AK_FN F round_by_adding(F x) {
    const F big = all_of<F>(sizeof(typename lane<F>::E) == 4 ? 0x1p23f : 0x1p52), a = magnitude(x);
    return with_sign(select(a < big, (a + big) - big, a), x);
}
template <class F> AK_FN F floor_by_adding(F x) {
    const F r = round_by_adding(x);
    return r - select(r > x, all_of<F>(1), all_of<F>(0));
}
template <class F> AK_FN F ceil_by_adding(F x) { return from_bits<F>(bits(floor_by_adding(-x)) ^ bits(all_of<F>(SIGN<F>))); }
template <class F> AK_FN F trunc_by_adding(F x) { return with_sign(floor_by_adding(magnitude(x)), x); }

// Island: the smaller (larger) one, the second when either is NaN, which is what x86's instruction does.
template <class F> AK_FN F less_or_second(F a, F b) {
#if defined(AK_AVX512)
    if constexpr (is<F, vf>) return (vf)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b);
    if constexpr (is<F, vd>) return (vd)_mm512_maskz_min_pd(0xff, (__m512d)a, (__m512d)b);
#endif
    return select(a < b, a, b);
}
template <class F> AK_FN F greater_or_second(F a, F b) {
#if defined(AK_AVX512)
    if constexpr (is<F, vf>) return (vf)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
    if constexpr (is<F, vd>) return (vd)_mm512_maskz_max_pd(0xff, (__m512d)a, (__m512d)b);
#endif
    return select(a > b, a, b);
}
}  // namespace detail

#define AK_FOR_LANES(AK_M) AK_M(vf) AK_M(vd) AK_M(float) AK_M(double)
#define AK_BASIC(F)                                                                     \
    AK_FN F abs(F x) { return detail::magnitude(x); }                                   \
    AK_FN F recip(F x) { return 1 / x; }                                                \
    AK_FN F rsqrt(F x) { return 1 / sqrt(x); }                                          \
    AK_FN F max(F a, F b) { return select(a != a, a, detail::greater_or_second(a, b)); }                              \
    AK_FN F min(F a, F b) { return select(a != a, a, detail::less_or_second(a, b)); }                             \
    AK_FN auto isnan(F x) { return x != x; }
AK_FOR_LANES(AK_BASIC)
#undef AK_BASIC
#if defined(AK_ROUND)
#define AK_ROUND_SCALAR(name, builtin)                                                  \
    AK_FN float name(float x) { return __builtin_##builtin##f(x); }                     \
    AK_FN double name(double x) { return __builtin_##builtin(x); }
AK_ROUND(round, 0, vrndn) AK_ROUND(floor, 1, vrndm) AK_ROUND(ceil, 2, vrndp) AK_ROUND(trunc, 3, vrnd)
AK_ROUND_SCALAR(round, rint) AK_ROUND_SCALAR(floor, floor) AK_ROUND_SCALAR(ceil, ceil) AK_ROUND_SCALAR(trunc, trunc)
#undef AK_ROUND_SCALAR
#undef AK_ROUND
#else
#define AK_ROUND(F)                                                                     \
    AK_FN F round(F x) { return detail::round_by_adding(x); }                           \
    AK_FN F floor(F x) { return detail::floor_by_adding(x); }                           \
    AK_FN F ceil(F x) { return detail::ceil_by_adding(x); }                             \
    AK_FN F trunc(F x) { return detail::trunc_by_adding(x); }
AK_FOR_LANES(AK_ROUND)
#undef AK_ROUND
#endif

// ---- across the lanes, as a tree of fixed shape ----
namespace detail {
template <int N, class V, class Op> AK_FN auto across(V x, Op op) {
    if constexpr (N == 1) return x[0];
    else if constexpr (N == 2) return op(x[0], x[1]);
    else return across<N / 2>(op(pick<0>(x, upto<N / 2>{}), pick<N / 2>(x, upto<N / 2>{})), op);
}
struct sum { template <class V> AK_MEMBER V operator()(V a, V b) const { return a + b; } };
struct most { template <class V> AK_MEMBER V operator()(V a, V b) const { V m = a > b ? a : b; return a != a ? a : m; } };
struct least { template <class V> AK_MEMBER V operator()(V a, V b) const { V m = a < b ? a : b; return a != a ? a : m; } };
}  // namespace detail
AK_FN float hsum(vf x) { return detail::across<LANES>(x, detail::sum{}); }
AK_FN float hmax(vf x) { return detail::across<LANES>(x, detail::most{}); }
AK_FN float hmin(vf x) { return detail::across<LANES>(x, detail::least{}); }
AK_FN double hsum(vd x) { return detail::across<DLANES>(x, detail::sum{}); }
AK_FN double hmax(vd x) { return detail::across<DLANES>(x, detail::most{}); }
AK_FN double hmin(vd x) { return detail::across<DLANES>(x, detail::least{}); }

// ---- f16 and bf16: round to nearest even, NaN stays NaN, denormals exact, too large becomes inf ----
namespace detail {
template <class U> AK_FN U choose(bool m, U a, U b) { return m ? a : b; }
template <class M, class U> AK_FN U choose(M m, U a, U b) { return m ? a : b; }
// U: lanes of uint32_t (or one); F: as many of float. Lanes hold 16 bits in their low half.
template <class U, class F> AK_FN F bf16_to_f32(U x) { return bit_cast<F>(x << 16); }
template <class U, class F> AK_FN U f32_to_bf16(F x) {
    const U u = bit_cast<U>(x);
    return choose(x != x, (u >> 16) | 0x40, (u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
// The exponent is moved by a multiplication, which makes denormals come out right as well.
template <class U, class F> AK_FN F f16_to_f32(U x) {
    const U m = (x & 0x7fff) << 13;
    const U u = bit_cast<U>(bit_cast<F>(m) * 0x1p112f);
    return bit_cast<F>(choose(m >= 0x0f800000u, u | 0x7f800000u, u) | ((x & 0x8000) << 16));
}
template <class U, class F> AK_FN U f32_to_f16(F x) {
    const U b = bit_cast<U>(x), u = b & 0x7fffffffu;
    const U normal = (u + 0xfff + ((u >> 13) & 1) - (112u << 23)) >> 13;
    const U denormal = bit_cast<U>(bit_cast<F>(u) + 0.5f) - 0x3f000000u;  // 0.5 has the ulp of f16's denormals
    U r = choose(u >= 0x38800000u, normal, denormal);
    r = choose(u >= 0x477ff000u, (u & 0) + 0x7c00u, r);
    r = choose(u > 0x7f800000u, ((u >> 13) & 0x3ff) | 0x7e00u, r);
    return r | ((b >> 16) & 0x8000);
}

// Island: the F16C and NEON conversions, else the arithmetic above.
template <int N> AK_FN piece<float, N> wide_f16(piece<uint16_t, N> x) {
#if defined(AK_AVX512)
    if constexpr (N == 16) return (vf)_mm512_maskz_cvtph_ps(0xffff, (__m256i)x);
#endif
#if defined(__F16C__)
    if constexpr (N == 8) return (piece<float, N>)_mm256_cvtph_ps((__m128i)x);
#elif defined(__aarch64__)
    if constexpr (N == 4) return (piece<float, N>)vcvt_f32_f16((float16x4_t)x);
#endif
    return f16_to_f32<piece<uint32_t, N>, piece<float, N>>(__builtin_convertvector(x, piece<uint32_t, N>));
}
template <int N> AK_FN piece<uint16_t, N> narrow_f16(piece<float, N> x) {
#if defined(AK_AVX512)
    if constexpr (N == 16) return (piece<uint16_t, N>)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
#if defined(__F16C__)
    if constexpr (N == 8) return (piece<uint16_t, N>)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
    if constexpr (N == 4) return (piece<uint16_t, N>)vcvt_f16_f32((float32x4_t)x);
#endif
    return __builtin_convertvector(f32_to_f16<piece<uint32_t, N>>(x), piece<uint16_t, N>);
}

// How T lies in memory.
template <class T> struct stored { typedef T type; };
template <> struct stored<bool> { typedef uint8_t type; };
template <> struct stored<bf16> { typedef uint16_t type; };
template <> struct stored<f16> { typedef uint16_t type; };
template <class T, int N> using stored_piece = piece<typename stored<T>::type, N>;

// N stored elements <-> N lanes of E.
template <class T, class E, int N> AK_FN piece<E, N> decode(stored_piece<T, N> x) {
    if constexpr (is<T, E>) return x;
    else if constexpr (is<T, bf16>) {
        const auto f = bf16_to_f32<piece<uint32_t, N>, piece<float, N>>(__builtin_convertvector(x, piece<uint32_t, N>));
        return __builtin_convertvector(f, piece<E, N>);
    } else if constexpr (is<T, f16>) return __builtin_convertvector(wide_f16<N>(x), piece<E, N>);
    else if constexpr (is<T, bool>) return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector((x != 0) & 1, piece<int16_t, N>), piece<int32_t, N>), piece<E, N>);
    else if constexpr (sizeof(T) == 1) return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(x, piece<int16_t, N>), piece<int32_t, N>), piece<E, N>);
    else return __builtin_convertvector(x, piece<E, N>);
}
template <class T, class E, int N> AK_FN stored_piece<T, N> encode(piece<E, N> x) {
    if constexpr (is<T, E>) return x;
    else if constexpr (is<T, bf16>) {
        const auto u = f32_to_bf16<piece<uint32_t, N>>(__builtin_convertvector(x, piece<float, N>));
        return __builtin_convertvector(u, piece<uint16_t, N>);
    } else if constexpr (is<T, f16>) return narrow_f16<N>(__builtin_convertvector(x, piece<float, N>));
    else if constexpr (is<T, bool>) return __builtin_convertvector((x != 0) & 1, piece<uint8_t, N>);
    else if constexpr (sizeof(T) == 1) return __builtin_convertvector(__builtin_convertvector(x, piece<int32_t, N>), piece<T, N>);
    else return __builtin_convertvector(x, piece<T, N>);
}

// Island: the first n elements of a piece. Memory beyond them is not touched (masked accesses don't fault there).
template <class T, int N> AK_FN piece<T, N> load_some(const void* p, int n) {
    typedef piece<T, N> P;
    n = n < 0 ? 0 : n > N ? N : n;
#if defined(AK_AVX512)
    const uint32_t k = (1u << n) - 1;
    if constexpr (sizeof(T) == 4 && N == 16) return (P)_mm512_maskz_loadu_epi32(k, p);
    if constexpr (sizeof(T) == 4 && N == 8) return (P)_mm256_maskz_loadu_epi32(k, p);
    if constexpr (sizeof(T) == 8 && N == 8) return (P)_mm512_maskz_loadu_epi64(k, p);
    if constexpr (sizeof(T) == 2 && N == 16) return (P)_mm256_maskz_loadu_epi16(k, p);
    if constexpr (sizeof(T) == 2 && N == 8) return (P)_mm_maskz_loadu_epi16(k, p);
    if constexpr (sizeof(T) == 1 && N == 16) return (P)_mm_maskz_loadu_epi8(k, p);
    if constexpr (sizeof(T) == 1 && N == 8) return bit_cast<P>(((piece<int64_t, 2>)_mm_maskz_loadu_epi8(k, p))[0]);
#elif defined(AK_AVX2)
    if constexpr (sizeof(T) == 4 && N == 8) return (P)_mm256_maskload_epi32((const int*)p, (__m256i)(iota(upto<8>{}) < n));
    if constexpr (sizeof(T) == 8 && N == 4) return (P)_mm256_maskload_epi64((const long long*)p, (__m256i)(md{0, 1, 2, 3} < n));
#endif
    T a[N] = {};
    for (int i = 0; i < N; ++i) if (i < n) __builtin_memcpy(a + i, (const T*)p + i, sizeof(T));
    return load_piece<P>(a);
}
template <class T, int N> AK_FN void store_some(void* p, piece<T, N> x, int n) {
    n = n < 0 ? 0 : n > N ? N : n;
#if defined(AK_AVX512)
    const uint32_t k = (1u << n) - 1;
    if constexpr (sizeof(T) == 4 && N == 16) return _mm512_mask_storeu_epi32(p, k, (__m512i)x);
    if constexpr (sizeof(T) == 4 && N == 8) return _mm256_mask_storeu_epi32(p, k, (__m256i)x);
    if constexpr (sizeof(T) == 8 && N == 8) return _mm512_mask_storeu_epi64(p, k, (__m512i)x);
    if constexpr (sizeof(T) == 2 && N == 16) return _mm256_mask_storeu_epi16(p, k, (__m256i)x);
    if constexpr (sizeof(T) == 2 && N == 8) return _mm_mask_storeu_epi16(p, k, (__m128i)x);
    if constexpr (sizeof(T) == 1 && N == 16) return _mm_mask_storeu_epi8(p, k, (__m128i)x);
    if constexpr (sizeof(T) == 1 && N == 8) return _mm_mask_storeu_epi8(p, k, (__m128i)piece<int64_t, 2>{bit_cast<int64_t>(x), 0});
#elif defined(AK_AVX2)
    if constexpr (sizeof(T) == 4 && N == 8) return _mm256_maskstore_epi32((int*)p, (__m256i)(iota(upto<8>{}) < n), (__m256i)x);
    if constexpr (sizeof(T) == 8 && N == 4) return _mm256_maskstore_epi64((long long*)p, (__m256i)(md{0, 1, 2, 3} < n), (__m256i)x);
#endif
    T a[N];
    store_piece(a, x);
    for (int i = 0; i < N; ++i) if (i < n) __builtin_memcpy((T*)p + i, a + i, sizeof(T));
}
}  // namespace detail

AK_FN float to_float(bf16 x) { return detail::bf16_to_f32<uint32_t, float>(x.bits); }
AK_FN float to_float(f16 x) { return detail::f16_to_f32<uint32_t, float>(x.bits); }
AK_FN bf16 to_bf16(float x) { return bf16{uint16_t(detail::f32_to_bf16<uint32_t>(x))}; }
AK_FN f16 to_f16(float x) { return f16{uint16_t(detail::f32_to_f16<uint32_t>(x))}; }

// ---- memory: T is float, double, bf16, f16, int8_t, uint8_t, int32_t, int64_t or bool ----
// Conversions are C's (to an integer: towards zero), double to f16 or bf16 goes through float, as in torch.
template <class F, class T> AK_FN F load_partial_as(const T* p, int n);
template <class F, class T> AK_FN F load_as(const T* p) {
    typedef typename lane<F>::E E;
    typedef typename detail::stored<T>::type S;
    constexpr int N = lane<F>::N;
    if constexpr (N == 1 && (detail::is<T, bf16> || detail::is<T, f16>)) return E(to_float(*p));
    else if constexpr (N == 1 && detail::is<T, bool>) return E(*(const uint8_t*)p != 0);
    else if constexpr (N == 1) return E(*p);
    else if constexpr (sizeof(S) > sizeof(E)) {  // twice a register: in halves
        const auto lo = detail::load_piece<detail::piece<S, N / 2>>(p), hi = detail::load_piece<detail::piece<S, N / 2>>(p + N / 2);
        return concat(detail::decode<T, E, N / 2>(lo), detail::decode<T, E, N / 2>(hi));
    } else return detail::decode<T, E, N>(detail::load_piece<detail::piece<S, N>>(p));
}
// Zeros stand in the lanes from n on.
template <class F, class T> AK_FN F load_partial_as(const T* p, int n) {
    typedef typename lane<F>::E E;
    typedef typename detail::stored<T>::type S;
    constexpr int N = lane<F>::N;
    if constexpr (N == 1) return n > 0 ? load_as<F>(p) : F(0);
    else if constexpr (sizeof(S) > sizeof(E)) {
        const auto lo = detail::load_some<S, N / 2>(p, n), hi = detail::load_some<S, N / 2>(p + N / 2, n - N / 2);
        return concat(detail::decode<T, E, N / 2>(lo), detail::decode<T, E, N / 2>(hi));
    } else return detail::decode<T, E, N>(detail::load_some<S, N>(p, n));
}
template <class T, class F> AK_FN void store_from(T* p, F x) {
    typedef typename lane<F>::E E;
    constexpr int N = lane<F>::N;
    if constexpr (N == 1 && detail::is<T, bf16>) *p = to_bf16(float(x));
    else if constexpr (N == 1 && detail::is<T, f16>) *p = to_f16(float(x));
    else if constexpr (N == 1 && detail::is<T, bool>) *p = x != 0;
    else if constexpr (N == 1 && sizeof(T) == 1) *p = T(int32_t(x));
    else if constexpr (N == 1) *p = T(x);
    else if constexpr (sizeof(T) > sizeof(E)) {
        detail::store_piece(p, detail::encode<T, E, N / 2>(low(x)));
        detail::store_piece(p + N / 2, detail::encode<T, E, N / 2>(high(x)));
    } else detail::store_piece(p, detail::encode<T, E, N>(x));
}
template <class T, class F> AK_FN void store_partial_from(T* p, F x, int n) {
    typedef typename lane<F>::E E;
    typedef typename detail::stored<T>::type S;
    constexpr int N = lane<F>::N;
    if constexpr (N == 1) { if (n > 0) store_from(p, x); }
    else if constexpr (sizeof(S) > sizeof(E)) {
        detail::store_some<S, N / 2>(p, detail::encode<T, E, N / 2>(low(x)), n);
        detail::store_some<S, N / 2>(p + N / 2, detail::encode<T, E, N / 2>(high(x)), n - N / 2);
    } else detail::store_some<S, N>(p, detail::encode<T, E, N>(x), n);
}
AK_FN vf loadu(const float* p) { return load_as<vf>(p); }
AK_FN vd loadu(const double* p) { return load_as<vd>(p); }
AK_FN void storeu(float* p, vf x) { store_from(p, x); }
AK_FN void storeu(double* p, vd x) { store_from(p, x); }
AK_FN vf load_partial(const float* p, int n) { return load_partial_as<vf>(p, n); }
AK_FN vd load_partial(const double* p, int n) { return load_partial_as<vd>(p, n); }
AK_FN void store_partial(float* p, vf x, int n) { store_partial_from(p, x, n); }
AK_FN void store_partial(double* p, vd x, int n) { store_partial_from(p, x, n); }
// The first n of p[0], p[stride], p[2 * stride] … (zeros from n on), and the reverse.
template <class F, class T> AK_FN F gather(const T* p, int64_t stride, int n) {
    F r{};
    if constexpr (lane<F>::N == 1) return load_partial_as<F>(p, n);
    else if (n >= lane<F>::N) for (int i = 0; i < lane<F>::N; ++i) r[i] = load_as<typename lane<F>::E>(p + i * stride);
    else for (int i = 0; i < n; ++i) r[i] = load_as<typename lane<F>::E>(p + i * stride);
    return r;
}
template <class T, class F> AK_FN void scatter(T* p, int64_t stride, F x, int n) {
    if constexpr (lane<F>::N == 1) store_partial_from(p, x, n);
    else for (int i = 0; i < (n < lane<F>::N ? n : lane<F>::N); ++i) store_from(p + i * stride, typename lane<F>::E(x[i]));
}

// ---- maths ----
namespace detail {
// Constants of the two types. Coefficients are our own minimax fits (`derive_coefficients.py`), lowest order first.
// LN2_HIGH has so few bits that its product with any exponent is exact, with or without fma.
template <class E> struct constants;
template <> struct constants<float> {
    static constexpr int FRACTION = 23, BIAS = 127;
    static constexpr float SHIFT = 0x1.8p23f, INFINITE = __builtin_inff(), QUIET = __builtin_nanf("");
    static constexpr float LOG2_E = 0x1.715476p+0f, LN2_HIGH = 0x1.62e4p-1f, LN2_LOW = 0x1.7f7d1cp-20f;
    static constexpr float EXP_LOW = -104.0f, EXP_HIGH = 89.0f, MINUS_ONE_BELOW = -18.0f, TANH_ONE = 9.1f;
    static constexpr float SMALLEST_NORMAL = 0x1p-126f, OUT_OF_DENORMALS = 0x1p24f;
    static constexpr int32_t THREE_QUARTERS = 0x3f400000;
    static constexpr float EXP[] = {0.49999994f, 0.166665196f, 0.0416682586f, 0.0083688572f, 0.00138217828f};
    static constexpr float EXPM1[] = {
        0.5f, 0.166666657f, 0.0416664928f, 0.00833354332f, 0.00139323843f, 0.000197644142f};
    static constexpr float LOG[] = {
        -0.5f, 0.333334506f, -0.250001013f, 0.199908122f, -0.166471541f, 0.144788116f, -0.13162531f,
        0.104624711f, -0.04505153f};
};
template <> struct constants<double> {
    static constexpr int FRACTION = 52, BIAS = 1023;
    static constexpr double SHIFT = 0x1.8p52, INFINITE = __builtin_inf(), QUIET = __builtin_nan("");
    static constexpr double LOG2_E = 0x1.71547652b82fep+0, LN2_HIGH = 0x1.62e42feep-1, LN2_LOW = 0x1.a39ef35793c76p-33;
    static constexpr double EXP_LOW = -746.0, EXP_HIGH = 710.0, MINUS_ONE_BELOW = -40.0, TANH_ONE = 19.5;
    static constexpr double SMALLEST_NORMAL = 0x1p-1022, OUT_OF_DENORMALS = 0x1p53;
    static constexpr int64_t THREE_QUARTERS = 0x3fe8000000000000;
    static constexpr double EXP[] = {
        0.5000000000000011, 0.16666666666666413, 0.041666666666525874, 0.008333333333494026,
        0.0013888888944828905, 0.00019841269508493958, 2.4801491785653943e-05, 2.7557583365135235e-06,
        2.763074060310625e-07, 2.5001503738608443e-08};
    static constexpr double EXPM1[] = {
        0.5, 0.16666666666666666, 0.041666666666666664, 0.008333333333334325, 0.0013888888888888495,
        0.00019841269837796133, 2.4801587312949635e-05, 2.7557324567043957e-06, 2.7557286604111497e-07,
        2.5048346499760402e-08, 2.091014101025831e-09, 1.7061469222848154e-10};
    static constexpr double LOG[] = {
        0.666666666666666, 0.4000000000005765, 0.2857142855547542, 0.22222224344161906, 0.18181662719621106,
        0.15391221686842602, 0.1317167449492704, 0.13856468421316367};  // in s^2, for s = f / (2 + f)
};
template <class F> using constant = constants<typename lane<F>::E>;
constexpr float SIN[] = {-0.166666538f, 0.00833211001f, -0.000195089058f};
constexpr float COS[] = {0.0416666456f, -0.00138873071f, 2.44318817e-05f};
constexpr float TANH[] = {-0.333333164f, 0.133325502f, -0.0538486913f, 0.0210572239f, -0.00625425251f};
// Around 0.25, 0.75, … 3.75: erf(x) / x in the first two columns, erf(x) - 1 in the others. One row for each power.
constexpr float ERF[7][8] = {
    {1.10530555f, 0.948207498f, -0.0770998672f, -0.0133283287f, -0.00146271684f, -0.000100621903f, -4.30276214e-06f, -1.13724703e-07f},
    {-0.181165591f, -0.407035261f, 0.236521155f, 0.0527748391f, 0.00714230072f, 0.000586294278f, 2.91936522e-05f, 8.81885626e-07f},
    {-0.335350275f, -0.100214876f, -0.295652151f, -0.0923561975f, -0.0160701219f, -0.00161227025f, -9.4871968e-05f, -3.30645412e-06f},
    {0.104696847f, 0.169334188f, 0.167526588f, 0.0901775211f, 0.021726938f, 0.00275820913f, 0.000195219676f, 7.91181174e-06f},
    {0.0889998004f, -0.0249465909f, -0.0061194622f, -0.0481060445f, -0.0190897379f, -0.00325758755f, -0.000286051567f, -1.37684865e-05f},
    {-0.0350274891f, -0.0374023207f, -0.0468172431f, 0.00597150251f, 0.0105816266f, 0.00282578706f, 0.000332605414f, 2.02039537e-05f},
    {-0.0178343449f, 0.0149775418f, 0.0204818919f, 0.00905647222f, -0.00276379241f, -0.00166917499f, -0.000275041937f, -2.08755682e-05f},};

template <class F, int N> AK_FN F polynomial(F x, const typename lane<F>::E (&c)[N]) {
    F r = all_of<F>(c[N - 1]);
    for (int i = N - 2; i >= 0; --i) r = fma(r, x, all_of<F>(c[i]));
    return r;
}
// Both let NaN through.
template <class F> AK_FN F at_most(F x, typename lane<F>::E limit) { return less_or_second(all_of<F>(limit), x); }
template <class F> AK_FN F at_least(F x, typename lane<F>::E limit) { return greater_or_second(all_of<F>(limit), x); }
// 2^n for a whole n in the normal range: the sum leaves n + BIAS in the low bits of the fraction.
template <class F> AK_FN F power_of_two(F n) {
    typedef constant<F> C;
    return from_bits<F>(bits(n + all_of<F>(C::SHIFT + C::BIAS)) << C::FRACTION);
}
// y * 2^n with one rounding, also into denormals and to infinity (|n| below twice the exponent's range).
template <class F> AK_FN F scale(F y, F n) {
#if defined(AK_AVX512)
    if constexpr (is<F, vf>) return (vf)_mm512_maskz_scalef_ps(0xffff, (__m512)y, (__m512)n);
    if constexpr (is<F, vd>) return (vd)_mm512_maskz_scalef_pd(0xff, (__m512d)y, (__m512d)n);
#endif
    const F shift = all_of<F>(constant<F>::SHIFT), half = fma(n, all_of<F>(0.5f), shift) - shift;
    return y * power_of_two(half) * power_of_two(n - half);
}
// x = n ln 2 + r with |r| <= ln 2 / 2.
template <class F> AK_FN F split_exponent(F x, F& n) {
    typedef constant<F> C;
    const F shift = all_of<F>(C::SHIFT);
    n = fma(x, all_of<F>(C::LOG2_E), shift) - shift;
    return fma(n, all_of<F>(-C::LN2_LOW), fma(n, all_of<F>(-C::LN2_HIGH), x));
}
template <class F> AK_FN F exp(F x) {
    typedef constant<F> C;
    const F one = all_of<F>(1);
    F n;
    const F r = split_exponent(at_least(at_most(x, C::EXP_HIGH), C::EXP_LOW), n);
    return scale(fma(fma(polynomial(r, C::EXP), r, one), r, one), n);
}
// 2^n (e^r - 1) + (2^n - 1), halved because 2^128 is no float. For n = 0 it is e^r - 1 itself, which matters near 0.
template <class F, bool NEAR_0> AK_FN F expm1_bounded(F x) {
    F n;
    const F r = split_exponent(x, n);
    F tail;
    if constexpr (NEAR_0) tail = polynomial(r, constant<F>::EXPM1);
    else tail = polynomial(r, constant<F>::EXP);
    const F q = fma(r * r, tail, r);
    const F s = power_of_two(n - 1), y = fma(s, q, s - all_of<F>(0.5f));
    if constexpr (NEAR_0) return select(n == 0, q, y + y);
    else return y + y;
}
template <class F> AK_FN F expm1(F x) {
    typedef constant<F> C;
    const F y = expm1_bounded<F, true>(at_least(at_most(x, C::EXP_HIGH), C::MINUS_ONE_BELOW));
    return from_bits<F>(bits(y) | sign_of(x));
}
// e / (e + 2) with e = e^2|x| - 1: no cancellation anywhere. In f32 a polynomial below 0.55, for its last half ulp.
template <class F> AK_FN F tanh(F x) {
    const F a = at_most(magnitude(x), constant<F>::TANH_ONE);
    if constexpr (sizeof(typename lane<F>::E) == 4) {
        const F e = expm1_bounded<F, false>(a + a), u = a * a, near_0 = fma(a * u, polynomial(u, TANH), a);
        return with_sign(select(a < 0.55f, near_0, e / (e + 2)), x);
    } else {
        const F e = expm1_bounded<F, true>(a + a);
        return with_sign(e / (e + 2), x);
    }
}
// By e^-|x|, which never overflows; small results keep their relative accuracy.
template <class F> AK_FN F sigmoid(F x) {
    const F one = all_of<F>(1), e = exp(-magnitude(x));
    return select(x < 0, e, one) / (one + e);
}

template <class F> AK_FN F whole_to_float(typename lane<F>::I k) {
    if constexpr (is<F, vf>) return __builtin_convertvector(k, vf);
    else if constexpr (is<F, float>) return float(k);
    else return from_bits<F>(k + bits(all_of<F>(constant<F>::SHIFT))) - all_of<F>(constant<F>::SHIFT);
}
// k with x / 2^k in [0.75, 1.5), for normal x > 0.
template <class F> AK_FN typename lane<F>::I exponent(F x) { return (bits(x) - constant<F>::THREE_QUARTERS) >> constant<F>::FRACTION; }
// log(1 + f) + k ln 2 for f in [-0.25, 0.5].
template <class F> AK_FN F log_of_parts(F f, F k) {
    typedef constant<F> C;
    const F high = all_of<F>(C::LN2_HIGH), low = all_of<F>(C::LN2_LOW);
    if constexpr (sizeof(typename lane<F>::E) == 4) return fma(k, high, fma(f * f, polynomial(f, C::LOG), fma(k, low, f)));
    else {
        const F s = f / (f + 2), z = s * s, h = f * f * 0.5;
        return fma(k, high, f - (h - fma(s, fma(z, polynomial(z, C::LOG), h), k * low)));
    }
}
// What a logarithm is outside (0, inf); `x` is its argument.
template <class F> AK_FN F log_special(F y, F x) {
    typedef constant<F> C;
    y = select(x < C::INFINITE, y, x);  // inf, NaN
    return select(x > 0, y, select(x == 0, all_of<F>(-C::INFINITE), select(x < 0, all_of<F>(C::QUIET), x)));
}
template <class F> AK_FN F log(F x) {
    typedef constant<F> C;
#if defined(AK_AVX512)
    // The constant is the instruction's table: zero gives -inf, a negative NaN, +inf and NaN themselves.
    if constexpr (is<F, vf>) {
        const vf m = (vf)_mm512_maskz_getmant_ps(0xffff, (__m512)x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
        const vf k = (vf)_mm512_maskz_getexp_ps(0xffff, (__m512)x) + select(m < 1, splat(1.0f), vf{});
        return (vf)_mm512_fixupimm_ps((__m512)log_of_parts(m - 1, k), (__m512)x, _mm512_set1_epi32(0x03530422), 0);
    }
#endif
    const auto tiny = x < C::SMALLEST_NORMAL;
    const F y = select(tiny, x * C::OUT_OF_DENORMALS, x);
    const typename lane<F>::I k = exponent(y);
    const F m = from_bits<F>(bits(y) - (k << C::FRACTION));
    const F adjust = select(tiny, all_of<F>(-(C::FRACTION + 1)), all_of<F>(0));
    return log_special(log_of_parts(m - 1, whole_to_float<F>(k) + adjust), x);
}
// f = (1 + x) 2^-k - 1 straight from x, so the rounding of 1 + x is not in it.
template <class F> AK_FN F log1p(F x) {
    const F u = x + 1, k = whole_to_float<F>(exponent(u));
    const F shift = all_of<F>(constant<F>::SHIFT), half = fma(k, all_of<F>(0.5f), shift) - shift;
    const F s = power_of_two(-half), t = power_of_two(half - k);
    const F y = log_of_parts(fma(x * s, t, fma(s, t, all_of<F>(-1))), k);
    return select(x == 0, x, log_special(y, u));
}

// Island: c[index & 7] for each lane.
AK_FN float look_up(const float (&c)[8], int32_t index) { return c[index & 7]; }
AK_FN vf look_up(const float (&c)[8], mf index) {
#if defined(AK_AVX512)
    return (vf)_mm512_maskz_permutexvar_ps(0xffff, (__m512i)index, _mm512_maskz_broadcast_f32x8(0xffff, _mm256_loadu_ps(c)));
#elif defined(AK_AVX2)
    return (vf)_mm256_permutevar8x32_ps(_mm256_loadu_ps(c), (__m256i)index);
#else
    vf r{};
    for (int i = 0; i < LANES; ++i) r[i] = c[index[i] & 7];
    return r;
#endif
}
// One of eight polynomials in the distance from the middle of |x|'s interval, which a shift by 2^22 picks: times x
// below 1, and added to 1 above.
template <class F> AK_FN F erf(F x) {
    const F shift = all_of<F>(0x1.8p22f), a = at_most(magnitude(x), 3.95f), b = a - 0.25f, y = b + shift, t = b - (y - shift);
    const typename lane<F>::I i = bits(y);
    F q = look_up(ERF[6], i);
    for (int k = 5; k >= 0; --k) q = fma(q, t, look_up(ERF[k], i));
    const F one = all_of<F>(1);
    const auto large = a >= 1;
    return with_sign(fma(q, select(large, one, a), select(large, one, all_of<F>(0))), x);
}

// x = n pi/2 + r for |x| <= SIN_LIMIT: three parts of pi/2 with fma, else in f64 (two parts).
constexpr float SIN_LIMIT = 0x1p20f;
AK_FN float reduce_in_double(float x, float& n) {
    const double w = x, m = round_by_adding(w * 0x1.45f306dc9c883p-1);
    n = float(m);
    return float((w - m * 0x1.921fb544p+0) - m * 0x1.0b4611a626331p-34);
}
AK_FN vf reduce_in_double(vf x, vf& n) {
    vd r[2], m[2];
    for (int i = 0; i < 2; ++i) {
        const vd w = i ? widen_hi(x) : widen_lo(x);
        m[i] = (w * 0x1.45f306dc9c883p-1 + 0x1.8p52) - 0x1.8p52;
        r[i] = (w - m[i] * 0x1.921fb544p+0) - m[i] * 0x1.0b4611a626331p-34;
    }
    n = narrow(m[0], m[1]);
    return narrow(r[0], r[1]);
}
template <class F> AK_FN F reduce_angle(F x, typename lane<F>::I& quadrant) {
    const F shift = all_of<F>(0x1.8p23f);
#if defined(AK_FMA)
    const F y = fma(x, all_of<F>(0x1.45f306p-1f), shift), n = y - shift;
    const F r = fma(n, all_of<F>(0x1.777a5cp-25f), fma(n, all_of<F>(-0x1.921fb6p+0f), x));
    quadrant = bits(y);
    return fma(n, all_of<F>(0x1.ee59dap-50f), r);
#else
    F n;
    const F r = reduce_in_double(x, n);
    quadrant = bits(n + shift);
    return r;
#endif
}
// Beyond SIN_LIMIT lane by lane in libm. Out of line: hardly ever run.
template <bool COSINE> AK_COLD vf libm_angles(vf y, vf x) {
    for (int i = 0; i < LANES; ++i)
        if (!(__builtin_fabsf(x[i]) <= SIN_LIMIT)) y[i] = COSINE ? __builtin_cosf(x[i]) : __builtin_sinf(x[i]);
    return y;
}
template <bool COSINE> AK_COLD float libm_angles(float, float x) { return COSINE ? __builtin_cosf(x) : __builtin_sinf(x); }
template <bool COSINE, class F> AK_FN F sin_or_cos(F x) {
    typedef typename lane<F>::I I;
    I quadrant;
    const F r = reduce_angle(COSINE ? x : magnitude(x), quadrant);
    if constexpr (COSINE) quadrant = quadrant + 1;
    const F u = r * r, s = fma(r * u, polynomial(u, SIN), r);
    const F c = fma(u * u, polynomial(u, COS), fma(u, all_of<F>(-0.5f), all_of<F>(1.0f)));
    const F y = select((quadrant & 1) == 0, s, c);
    const I sign = ((quadrant & 2) << 30) ^ (COSINE ? I{} : sign_of(x));
    const F result = from_bits<F>(bits(y) ^ sign);
    const auto far = magnitude(x) > SIN_LIMIT;
    if (__builtin_expect(any(far), 0)) return libm_angles<COSINE>(result, x);
    return result;
}

// e^(y log|x|) in f64, then the cases that IEEE 754 sets apart.
AK_FN double pow_in_double(double x, double y) { return exp(y * log(x)); }
AK_FN vd pow_in_double(vd x, vd y) { return exp(y * log(x)); }
AK_FN float pow_magnitude(float x, float y) { return float(pow_in_double(double(x), double(y))); }
AK_FN vf pow_magnitude(vf x, vf y) {
    return narrow(pow_in_double(widen_lo(x), widen_lo(y)), pow_in_double(widen_hi(x), widen_hi(y)));
}
template <class F> AK_FN F pow(F x, F y) {
    const F a = magnitude(x), one = all_of<F>(1), half = y * 0.5f;
    F r = pow_magnitude(a, y);
    const F y_whole = ak::trunc(y), half_whole = ak::trunc(half);
    const auto odd = (y_whole == y) & (half_whole != half);
    r = select(odd, with_sign(r, x), r);  // also -0 and -inf
    r = select((x < 0) & (a < constants<float>::INFINITE) & (a > 0) & (y_whole != y), all_of<F>(constants<float>::QUIET), r);
    r = select((a == 1) & (magnitude(y) == constants<float>::INFINITE), one, r);
    return select((x == 1) | (y == 0), one, r);
}
}  // namespace detail

#define AK_PUBLIC(F, name) AK_FN F name(F x) { return detail::name(x); }
#define AK_BOTH(name) AK_PUBLIC(vf, name) AK_PUBLIC(vd, name) AK_PUBLIC(float, name) AK_PUBLIC(double, name)
AK_BOTH(exp) AK_BOTH(expm1) AK_BOTH(log) AK_BOTH(log1p) AK_BOTH(tanh) AK_BOTH(sigmoid)
AK_PUBLIC(vf, erf) AK_PUBLIC(float, erf)
AK_FN vf sin(vf x) { return detail::sin_or_cos<false>(x); }
AK_FN vf cos(vf x) { return detail::sin_or_cos<true>(x); }
AK_FN float sin(float x) { return detail::sin_or_cos<false>(x); }
AK_FN float cos(float x) { return detail::sin_or_cos<true>(x); }
AK_FN vf pow(vf x, vf y) { return detail::pow(x, y); }
AK_FN float pow(float x, float y) { return detail::pow(x, y); }
// f64 erf, sin, cos and pow are libm's, lane by lane.
#define AK_LIBM(name)                                                                   \
    AK_FN double name(double x) { return __builtin_##name(x); }                         \
    AK_FN vd name(vd x) { for (int i = 0; i < DLANES; ++i) x[i] = __builtin_##name(x[i]); return x; }
AK_LIBM(erf) AK_LIBM(sin) AK_LIBM(cos)
AK_FN double pow(double x, double y) { return __builtin_pow(x, y); }
AK_FN vd pow(vd x, vd y) { for (int i = 0; i < DLANES; ++i) x[i] = __builtin_pow(x[i], y[i]); return x; }
#undef AK_LIBM
#undef AK_BOTH
#undef AK_PUBLIC
#undef AK_FOR_LANES

}  // namespace ak
