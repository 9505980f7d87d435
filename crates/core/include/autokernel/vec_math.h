// The functions of vec.h: exponentials, logarithms, hyperbolic and circular functions, powers, the error function.
//
// Worst error in ulp against a wider libm, as `tests/vec_header.rs` measures it (which also asserts it):
//
//            f32    f64    method
//   exp      1.14   1.06   2^n e^r, |r| <= ln2/2, polynomial of degree 6 (f64: 11)
//   expm1    1.38   1.78   2^n (e^r - 1) + (2^n - 1), degree 7 (13)
//   log      0.91   0.81   f32: polynomial in m - 1 on [0.75, 1.5), degree 10; f64: atanh series in f / (2 + f)
//   log1p    0.92   0.78   as log, with f = (1 + x) 2^-k - 1 formed from x itself
//   tanh     1.50   2.35   e / (e + 2), e = expm1(2|x|); in f32 an odd polynomial of degree 11 below 0.55
//   sigmoid  2.26   1.99   e / (e + 1), e = e^x; relative accuracy also where it is small
//   erf      1.56   libm   eight intervals of degree 6, picked by a shuffle; f64 lane by lane in libm
//   sin      1.53   libm   pi/2 in three parts up to 2^20, then degree 7; f32 beyond and f64: libm, lane by lane
//   cos      1.55   libm   the same, degree 8
//   pow      0.51   libm   e^(y log x) in f64; f64 lane by lane in libm
//   rsqrt    1.48   1.47   1 / sqrt(x), as torch does it; recip and sqrt are exact to rounding
//
// All are right at 0, -0, inf, NaN and for denormal arguments and results (the sign of zero included).
#pragma once
#include "vec.h"

namespace ak {

namespace detail {
// Constants of the two types. Coefficients are our own minimax fits (`derive_coefficients.py`), lowest order first.
// LN2_HIGH has so few bits that its product with any exponent is exact, with or without fma.
template <class E> struct constants;
template <> struct constants<float> {
    static constexpr int FRACTION = 23, BIAS = 127;
    static constexpr float SHIFT = 0x1.8p23f, INFINITE = __builtin_inff(), QUIET = __builtin_nanf("");
    static constexpr float LOG2_E = 0x1.715476p+0f, LN2_HIGH = 0x1.62e4p-1f, LN2_LOW = 0x1.7f7d1cp-20f;
    static constexpr float EXP_LOW = -104.0f, EXP_HIGH = 89.0f, MINUS_ONE_BELOW = -18.0f, TANH_ONE = 9.1f, SIGMOID_ONE = 18.0f;
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
    static constexpr double EXP_LOW = -746.0, EXP_HIGH = 710.0, MINUS_ONE_BELOW = -40.0, TANH_ONE = 19.5, SIGMOID_ONE = 38.0;
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
// 2^n for a whole n in the normal range: the sum leaves n + BIAS in the low bits of the fraction.
template <class F> AK_FN F power_of_two(F n) {
    typedef constant<F> C;
    return from_bits<F>(bits(n + all_of<F>(C::SHIFT + C::BIAS)) << C::FRACTION);
}
// y * 2^n with one rounding, also into denormals and to infinity (|n| below twice the exponent's range).
template <class F> AK_FN F scale(F y, F n) {
#if defined(AK_AVX512)
    if constexpr (is<F, vf>) return AK_X86(__builtin_ia32_scalefps512_mask(y, n, vf{}, -1, 4), (vf)_mm512_maskz_scalef_ps(0xffff, (__m512)y, (__m512)n));
    if constexpr (is<F, vd>) return AK_X86(__builtin_ia32_scalefpd512_mask(y, n, vd{}, -1, 4), (vd)_mm512_maskz_scalef_pd(0xff, (__m512d)y, (__m512d)n));
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
// For x that is not above EXP_HIGH.
template <class F> AK_FN F exp_below(F x) {
    typedef constant<F> C;
    const F one = all_of<F>(1);
    F n;
    const F r = split_exponent(at_least(x, C::EXP_LOW), n);
    return scale(fma(fma(polynomial(r, C::EXP), r, one), r, one), n);
}
template <class F> AK_FN F exp(F x) { return exp_below(at_most(x, constant<F>::EXP_HIGH)); }
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
// e / (1 + e) for e = e^x: small results keep their relative accuracy, and where e would overflow the quotient has long
// been 1, so the bound above which e stays the same is where 1 + e rounds to e.
template <class F> AK_FN F sigmoid(F x) {
    const F e = exp_below(at_most(x, constant<F>::SIGMOID_ONE));
    return e / (e + 1);
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
        const vf m = (vf)AK_X86(__builtin_ia32_getmantps512_mask(x, 3, vf{}, -1, 4), _mm512_maskz_getmant_ps(0xffff, (__m512)x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src));
        const vf k = (vf)AK_X86(__builtin_ia32_getexpps512_mask(x, vf{}, -1, 4), _mm512_maskz_getexp_ps(0xffff, (__m512)x)) + select(m < 1, splat(1.0f), vf{});
        const vf y = log_of_parts(m - 1, k);
        const mf table = mf{} + 0x03530422;
        return (vf)AK_X86(__builtin_ia32_fixupimmps512_mask(y, x, table, 0, -1, 4), _mm512_fixupimm_ps((__m512)y, (__m512)x, (__m512i)table, 0));
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
    const auto row = load_piece<piece<float, 8>>(c);
    const vf both = (vf)AK_X86(__builtin_ia32_broadcastf32x8_512_mask(row, vf{}, -1), _mm512_maskz_broadcast_f32x8(0xffff, (__m256)row));
    return (vf)AK_X86(__builtin_ia32_permvarsf512_mask(both, index, vf{}, -1), _mm512_maskz_permutexvar_ps(0xffff, (__m512i)index, (__m512)both));
#elif defined(AK_AVX2)
    const vf row = load_piece<vf>(c);
    return (vf)AK_X86(__builtin_ia32_permvarsf256(row, index), _mm256_permutevar8x32_ps((__m256)row, (__m256i)index));
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
