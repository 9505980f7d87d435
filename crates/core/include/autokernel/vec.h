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
// The maths is in vec_math.h, which comes along with this file.
#pragma once
#include <stdint.h>
#if defined(__x86_64__)
// Keeps <stdlib.h> out of <immintrin.h>: its std::abs would collide with ours under `using namespace ak`.
#define _MM_MALLOC_H_INCLUDED
#define __MM_MALLOC_H
#endif
// An instruction of x86 under its name in GCC and in <immintrin.h>. That header is three quarters of the time that GCC
// takes for a kernel, and a search compiles dozens; the names in GCC are its own business, so they are used only where
// they are known to mean the same.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ <= 15 && !defined(AK_IMMINTRIN)
#define AK_X86(builtin, intrinsic) (builtin)
#elif defined(__x86_64__)
#include <immintrin.h>
#define AK_X86(builtin, intrinsic) (intrinsic)
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

// How GCC spells the types of its instructions.
typedef long long q4 __attribute__((vector_size(32)));
typedef long long q8 __attribute__((vector_size(64)));
typedef short h8 __attribute__((vector_size(16)));
typedef short h16 __attribute__((vector_size(32)));
typedef char b16 __attribute__((vector_size(16)));
typedef int i8 __attribute__((vector_size(32)));

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
    return AK_X86(__builtin_ia32_cvtd2mask512(m), _mm512_movepi32_mask((__m512i)m)) != 0;
#elif defined(AK_AVX2)
    return AK_X86(__builtin_ia32_movmskps256((vf)m), _mm256_movemask_ps((__m256)m)) != 0;
#elif defined(__x86_64__)
    return AK_X86(__builtin_ia32_movmskps((vf)m), _mm_movemask_ps((__m128)m)) != 0;
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
AK_FN vf fma(vf a, vf b, vf c) { return (vf)AK_X86(__builtin_ia32_vfmaddps512_mask(a, b, c, -1, 4), _mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c)); }
AK_FN vd fma(vd a, vd b, vd c) { return (vd)AK_X86(__builtin_ia32_vfmaddpd512_mask(a, b, c, -1, 4), _mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c)); }
AK_FN vf sqrt(vf x) { return (vf)AK_X86(__builtin_ia32_sqrtps512_mask(x, vf{}, -1, 4), _mm512_maskz_sqrt_ps(0xffff, (__m512)x)); }
AK_FN vd sqrt(vd x) { return (vd)AK_X86(__builtin_ia32_sqrtpd512_mask(x, vd{}, -1, 4), _mm512_maskz_sqrt_pd(0xff, (__m512d)x)); }
AK_FN void stream(float* p, vf x) { AK_X86(__builtin_ia32_movntps512(p, x), _mm512_stream_ps(p, (__m512)x)); }
AK_FN void stream(double* p, vd x) { AK_X86(__builtin_ia32_movntpd512(p, x), _mm512_stream_pd(p, (__m512d)x)); }
#define AK_ROUND(name, imm, scalar)                                                     \
    AK_FN vf name(vf x) { return (vf)AK_X86(__builtin_ia32_rndscaleps_mask(x, imm | 8, vf{}, -1, 4), _mm512_maskz_roundscale_ps(0xffff, (__m512)x, imm | 8)); }        \
    AK_FN vd name(vd x) { return (vd)AK_X86(__builtin_ia32_rndscalepd_mask(x, imm | 8, vd{}, -1, 4), _mm512_maskz_roundscale_pd(0xff, (__m512d)x, imm | 8)); }
#elif defined(AK_AVX2)
#if defined(AK_FMA)
AK_FN vf fma(vf a, vf b, vf c) { return (vf)AK_X86(__builtin_ia32_vfmaddps256(a, b, c), _mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c)); }
AK_FN vd fma(vd a, vd b, vd c) { return (vd)AK_X86(__builtin_ia32_vfmaddpd256(a, b, c), _mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c)); }
#endif
AK_FN vf sqrt(vf x) { return (vf)AK_X86(__builtin_ia32_sqrtps256(x), _mm256_sqrt_ps((__m256)x)); }
AK_FN vd sqrt(vd x) { return (vd)AK_X86(__builtin_ia32_sqrtpd256(x), _mm256_sqrt_pd((__m256d)x)); }
AK_FN void stream(float* p, vf x) { AK_X86(__builtin_ia32_movntps256(p, x), _mm256_stream_ps(p, (__m256)x)); }
AK_FN void stream(double* p, vd x) { AK_X86(__builtin_ia32_movntpd256(p, x), _mm256_stream_pd(p, (__m256d)x)); }
#define AK_ROUND(name, imm, scalar)                                                     \
    AK_FN vf name(vf x) { return (vf)AK_X86(__builtin_ia32_roundps256(x, imm | 8), _mm256_round_ps((__m256)x, imm | 8)); }             \
    AK_FN vd name(vd x) { return (vd)AK_X86(__builtin_ia32_roundpd256(x, imm | 8), _mm256_round_pd((__m256d)x, imm | 8)); }
#elif defined(__x86_64__)
#if defined(AK_FMA)
AK_FN vf fma(vf a, vf b, vf c) { return (vf)AK_X86(__builtin_ia32_vfmaddps(a, b, c), _mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c)); }
AK_FN vd fma(vd a, vd b, vd c) { return (vd)AK_X86(__builtin_ia32_vfmaddpd(a, b, c), _mm_fmadd_pd((__m128d)a, (__m128d)b, (__m128d)c)); }
#endif
AK_FN vf sqrt(vf x) { return (vf)AK_X86(__builtin_ia32_sqrtps(x), _mm_sqrt_ps((__m128)x)); }
AK_FN vd sqrt(vd x) { return (vd)AK_X86(__builtin_ia32_sqrtpd(x), _mm_sqrt_pd((__m128d)x)); }
AK_FN void stream(float* p, vf x) { AK_X86(__builtin_ia32_movntps(p, x), _mm_stream_ps(p, (__m128)x)); }
AK_FN void stream(double* p, vd x) { AK_X86(__builtin_ia32_movntpd(p, x), _mm_stream_pd(p, (__m128d)x)); }
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
    AK_X86(__builtin_ia32_sfence(), _mm_sfence());
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
    if constexpr (is<F, vf>) return AK_X86(__builtin_ia32_minps512_mask(a, b, vf{}, -1, 4), (vf)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b));
    if constexpr (is<F, vd>) return AK_X86(__builtin_ia32_minpd512_mask(a, b, vd{}, -1, 4), (vd)_mm512_maskz_min_pd(0xff, (__m512d)a, (__m512d)b));
#endif
    return select(a < b, a, b);
}
template <class F> AK_FN F greater_or_second(F a, F b) {
#if defined(AK_AVX512)
    if constexpr (is<F, vf>) return AK_X86(__builtin_ia32_maxps512_mask(a, b, vf{}, -1, 4), (vf)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b));
    if constexpr (is<F, vd>) return AK_X86(__builtin_ia32_maxpd512_mask(a, b, vd{}, -1, 4), (vd)_mm512_maskz_max_pd(0xff, (__m512d)a, (__m512d)b));
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
// One instruction where the limit is not NaN: lets a NaN of x through, and -0 beside 0, as torch's clamp does.
template <class F> AK_FN F at_most(F x, typename lane<F>::E limit) { return detail::less_or_second(all_of<F>(limit), x); }
template <class F> AK_FN F at_least(F x, typename lane<F>::E limit) { return detail::greater_or_second(all_of<F>(limit), x); }
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
    if constexpr (N == 16) return (vf)AK_X86(__builtin_ia32_vcvtph2ps512_mask((h16)x, vf{}, -1, 4), _mm512_maskz_cvtph_ps(0xffff, (__m256i)x));
#endif
#if defined(__F16C__)
    if constexpr (N == 8) return (piece<float, N>)AK_X86(__builtin_ia32_vcvtph2ps256((h8)x), _mm256_cvtph_ps((__m128i)x));
#elif defined(__aarch64__)
    if constexpr (N == 4) return (piece<float, N>)vcvt_f32_f16((float16x4_t)x);
#endif
    return f16_to_f32<piece<uint32_t, N>, piece<float, N>>(__builtin_convertvector(x, piece<uint32_t, N>));
}
template <int N> AK_FN piece<uint16_t, N> narrow_f16(piece<float, N> x) {
#if defined(AK_AVX512)
    if constexpr (N == 16) return (piece<uint16_t, N>)AK_X86(__builtin_ia32_vcvtps2ph512_mask(x, 8, h16{}, -1), _mm512_maskz_cvtps_ph(0xffff, (__m512)x, 8));
#endif
#if defined(__F16C__)
    if constexpr (N == 8) return (piece<uint16_t, N>)AK_X86(__builtin_ia32_vcvtps2ph256(x, 8), _mm256_cvtps_ph((__m256)x, 8));
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
    if constexpr (sizeof(T) == 4 && N == 16) return (P)AK_X86((__builtin_ia32_loaddqusi512_mask((const int*)p, mf{}, k)), _mm512_maskz_loadu_epi32(k, p));
    if constexpr (sizeof(T) == 4 && N == 8) return (P)AK_X86((__builtin_ia32_loaddqusi256_mask((const int*)p, i8{}, k)), _mm256_maskz_loadu_epi32(k, p));
    if constexpr (sizeof(T) == 8 && N == 8) return (P)AK_X86((__builtin_ia32_loaddqudi512_mask((const long long*)p, q8{}, k)), _mm512_maskz_loadu_epi64(k, p));
    if constexpr (sizeof(T) == 2 && N == 16) return (P)AK_X86((__builtin_ia32_loaddquhi256_mask((const short*)p, h16{}, k)), _mm256_maskz_loadu_epi16(k, p));
    if constexpr (sizeof(T) == 2 && N == 8) return (P)AK_X86((__builtin_ia32_loaddquhi128_mask((const short*)p, h8{}, k)), _mm_maskz_loadu_epi16(k, p));
    if constexpr (sizeof(T) == 1 && N == 16) return (P)AK_X86((__builtin_ia32_loaddquqi128_mask((const char*)p, b16{}, k)), _mm_maskz_loadu_epi8(k, p));
    if constexpr (sizeof(T) == 1 && N == 8) return bit_cast<P>(((piece<int64_t, 2>)AK_X86((__builtin_ia32_loaddquqi128_mask((const char*)p, b16{}, k)), _mm_maskz_loadu_epi8(k, p)))[0]);
#elif defined(AK_AVX2)
    if constexpr (sizeof(T) == 4 && N == 8) return (P)AK_X86((__builtin_ia32_maskloadd256((const i8*)p, iota(upto<8>{}) < n)), _mm256_maskload_epi32((const int*)p, (__m256i)(iota(upto<8>{}) < n)));
    if constexpr (sizeof(T) == 8 && N == 4) return (P)AK_X86((__builtin_ia32_maskloadq256((const q4*)p, (q4)(md{0, 1, 2, 3} < n))), _mm256_maskload_epi64((const long long*)p, (__m256i)(md{0, 1, 2, 3} < n)));
#endif
    T a[N] = {};
    for (int i = 0; i < N; ++i) if (i < n) __builtin_memcpy(a + i, (const T*)p + i, sizeof(T));
    return load_piece<P>(a);
}
template <class T, int N> AK_FN void store_some(void* p, piece<T, N> x, int n) {
    n = n < 0 ? 0 : n > N ? N : n;
#if defined(AK_AVX512)
    const uint32_t k = (1u << n) - 1;
    if constexpr (sizeof(T) == 4 && N == 16) return AK_X86(__builtin_ia32_storedqusi512_mask((int*)p, (mf)x, k), _mm512_mask_storeu_epi32(p, k, (__m512i)x));
    if constexpr (sizeof(T) == 4 && N == 8) return AK_X86(__builtin_ia32_storedqusi256_mask((int*)p, (i8)x, k), _mm256_mask_storeu_epi32(p, k, (__m256i)x));
    if constexpr (sizeof(T) == 8 && N == 8) return AK_X86(__builtin_ia32_storedqudi512_mask((long long*)p, (q8)x, k), _mm512_mask_storeu_epi64(p, k, (__m512i)x));
    if constexpr (sizeof(T) == 2 && N == 16) return AK_X86(__builtin_ia32_storedquhi256_mask((short*)p, (h16)x, k), _mm256_mask_storeu_epi16(p, k, (__m256i)x));
    if constexpr (sizeof(T) == 2 && N == 8) return AK_X86(__builtin_ia32_storedquhi128_mask((short*)p, (h8)x, k), _mm_mask_storeu_epi16(p, k, (__m128i)x));
    if constexpr (sizeof(T) == 1 && N == 16) return AK_X86(__builtin_ia32_storedquqi128_mask((char*)p, (b16)x, k), _mm_mask_storeu_epi8(p, k, (__m128i)x));
    if constexpr (sizeof(T) == 1 && N == 8) return AK_X86((__builtin_ia32_storedquqi128_mask((char*)p, (b16)piece<int64_t, 2>{bit_cast<int64_t>(x), 0}, k)), (_mm_mask_storeu_epi8(p, k, (__m128i)piece<int64_t, 2>{bit_cast<int64_t>(x), 0})));
#elif defined(AK_AVX2)
    if constexpr (sizeof(T) == 4 && N == 8) return AK_X86(__builtin_ia32_maskstored256((i8*)p, iota(upto<8>{}) < n, (i8)x), _mm256_maskstore_epi32((int*)p, (__m256i)(iota(upto<8>{}) < n), (__m256i)x));
    if constexpr (sizeof(T) == 8 && N == 4) return AK_X86((__builtin_ia32_maskstoreq256((q4*)p, (q4)(md{0, 1, 2, 3} < n), (q4)x)), (_mm256_maskstore_epi64((long long*)p, (__m256i)(md{0, 1, 2, 3} < n), (__m256i)x)));
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

}  // namespace ak

#include "vec_math.h"
