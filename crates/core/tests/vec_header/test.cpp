// Measures and checks autokernel/vec.h. Prints the worst error of each function and exits with 1 on any failure.
// Not a kernel: it may use the standard library, which is why everything of ours is called with `ak::`.
#include "autokernel/vec.h"

#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <sys/mman.h>
#include <type_traits>
#include <unistd.h>

using ak::vd;
using ak::vf;

static int failures = 0;
static bool exhaustive = false;

template <class... A> static void fail(const char* format, A... a) {
    if (++failures <= 40) {
        std::printf("FAIL ");
        std::printf(format, a...);
        std::printf("\n");
    }
}

template <class E> static bool same(E a, E b) { return (a != a && b != b) || std::memcmp(&a, &b, sizeof(E)) == 0; }

// Error of `got` in units in the last place of E at `truth`; denormals have the ulp of the smallest normal.
template <class E, class Wide> static double ulps(E got, Wide truth) {
    const E rounded = E(truth);
    if (same(got, rounded) && (got == 0 || !std::isfinite(got))) return 0;
    if (std::isnan(got) || std::isnan(rounded)) return 1e30;
    if (got == 0 && rounded == 0) return 1e30;  // the sign of zero
    Wide value = Wide(got);
    if (std::isinf(got)) value = std::copysign(std::ldexp(Wide(1), std::numeric_limits<E>::max_exponent), Wide(got));
    if (std::isinf(rounded) && std::isinf(double(truth)) && !std::isinf(got)) return 1e30;
    int e = 0;
    std::frexp(truth, &e);
    if (e < std::numeric_limits<E>::min_exponent) e = std::numeric_limits<E>::min_exponent;
    if (e > std::numeric_limits<E>::max_exponent) e = std::numeric_limits<E>::max_exponent;
    return double(std::fabs(value - truth) / std::ldexp(Wide(1), e - std::numeric_limits<E>::digits));
}

static uint64_t random_state = 0x9e3779b97f4a7c15;
static uint64_t draw() {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    return random_state ^= random_state << 17;
}

template <class E> struct Worst {
    double error = 0;
    E at = 0, got = 0;
    void see(double e, E x, E y) { if (e > error) error = e, at = x, got = y; }
};

static void report(const char* name, const char* type, double error, double at, double got, double bound) {
    std::printf("ulp %-8s %-4s %6.3f (bound %.2f) at %.9g -> %.9g\n", name, type, error, bound, at, got);
    if (!(error <= bound)) fail("%s %s is off by %g ulp at %.9g (%a), where it gives %.9g", name, type, error, at, at, got);
}

// Every stride-th bit pattern of f32 (all of them when exhaustive); the scalar form on some of them.
template <class Vector, class Scalar, class Truth>
static void sweep32(const char* name, double bound, Vector vector, Scalar scalar, Truth truth) {
    const uint64_t stride = exhaustive ? 1 : 509;
    Worst<float> worst;
    float in[ak::LANES], out[ak::LANES];
    int filled = 0;
    uint64_t seen = 0;
    for (uint64_t b = 0; b < (1ull << 32) + stride * ak::LANES; b += stride) {
        const uint32_t u = uint32_t(b);
        std::memcpy(&in[filled], &u, 4);
        if (++filled < ak::LANES) continue;
        filled = 0;
        ak::storeu(out, vector(ak::loadu(in)));
        for (int i = 0; i < ak::LANES; ++i) worst.see(ulps(out[i], truth(double(in[i]))), in[i], out[i]);
        if (++seen % 16 == 0) {
            const float y = scalar(in[0]);
            worst.see(ulps(y, truth(double(in[0]))), in[0], y);
        }
    }
    report(name, "f32", worst.error, worst.at, worst.got, bound);
}

template <class Vector, class Scalar, class Truth>
static void sweep64(const char* name, double bound, Vector vector, Scalar scalar, Truth truth) {
    Worst<double> worst;
    for (int k = 0; k < 150000 / ak::DLANES; ++k) {
        double in[ak::DLANES], out[ak::DLANES];
        for (double& x : in) {
            const uint64_t u = draw();
            if (k % 3 == 0) std::memcpy(&x, &u, 8);
            else x = std::ldexp(double(int64_t(u)) * 0x1p-63, int(draw() % 24) - 14);
        }
        ak::storeu(out, vector(ak::loadu(in)));
        for (int i = 0; i < ak::DLANES; ++i) worst.see(ulps(out[i], truth((long double)in[i])), in[i], out[i]);
        const double y = scalar(in[0]);
        worst.see(ulps(y, truth((long double)in[0])), in[0], y);
    }
    const double inf = INFINITY, special[] = {0.0, -0.0, inf, -inf, NAN, 1.0, -1.0, 0x1p-1074, -0x1p-1074, 0x1p-1022, 1e-310, 709.9, -745.2, -708.5, 710.5, 1e308, -1e308};
    for (const double x : special) {
        const double y = vector(ak::splat(x))[0], z = scalar(x);
        worst.see(ulps(y, truth((long double)x)), x, y);
        worst.see(ulps(z, truth((long double)x)), x, z);
    }
    report(name, "f64", worst.error, worst.at, worst.got, bound);
}

#define SWEEP32(name, bound, truth) sweep32(#name, bound, [](vf x) { return ak::name(x); }, [](float x) { return ak::name(x); }, [](double x) -> double { return truth; })
#define SWEEP64(name, bound, truth) sweep64(#name, bound, [](vd x) { return ak::name(x); }, [](double x) { return ak::name(x); }, [](long double x) -> long double { return truth; })

static void accuracy() {
    SWEEP32(exp, 1.25, std::exp(x));
    SWEEP32(expm1, 1.6, std::expm1(x));
    SWEEP32(log, 1.0, std::log(x));
    SWEEP32(log1p, 1.0, std::log1p(x));
    SWEEP32(tanh, 2.0, std::tanh(x));
    SWEEP32(sigmoid, 2.5, x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x)));
    SWEEP32(erf, 2.0, std::erf(x));
    SWEEP32(sin, 1.75, std::sin(x));
    SWEEP32(cos, 1.75, std::cos(x));
    SWEEP32(rsqrt, 1.5, 1 / std::sqrt(x));
    SWEEP32(recip, 0.5, 1 / x);
    SWEEP32(sqrt, 0.5, std::sqrt(x));
    SWEEP32(abs, 0, std::fabs(x));
    SWEEP32(floor, 0, std::floor(x));
    SWEEP32(ceil, 0, std::ceil(x));
    SWEEP32(trunc, 0, std::trunc(x));
    SWEEP32(round, 0, std::nearbyint(x));
    SWEEP64(exp, 1.25, std::exp(x));
    SWEEP64(expm1, 2.0, std::expm1(x));
    SWEEP64(log, 1.0, std::log(x));
    SWEEP64(log1p, 1.0, std::log1p(x));
    SWEEP64(tanh, 2.5, std::tanh(x));
    SWEEP64(sigmoid, 2.5, x < 0 ? std::exp(x) / (1 + std::exp(x)) : 1 / (1 + std::exp(-x)));
    SWEEP64(erf, 1.5, std::erf(x));
    SWEEP64(sin, 1.0, std::sin(x));
    SWEEP64(cos, 1.0, std::cos(x));
    SWEEP64(rsqrt, 1.5, 1 / std::sqrt(x));
    SWEEP64(sqrt, 0.5, std::sqrt(x));
    SWEEP64(floor, 0, std::floor(x));
    SWEEP64(ceil, 0, std::ceil(x));
    SWEEP64(trunc, 0, std::trunc(x));
    SWEEP64(round, 0, std::nearbyint(x));
}

static void powers() {
    Worst<float> worst;
    float other = 0;
    const auto see = [&](float x, float y, float got) {
        const double e = ulps(got, std::pow(double(x), double(y)));
        if (e > worst.error) other = y;
        worst.see(e, x, got);
    };
    for (int k = 0; k < (exhaustive ? 20000000 : 400000) / ak::LANES; ++k) {
        float x[ak::LANES], y[ak::LANES], z[ak::LANES];
        for (int i = 0; i < ak::LANES; ++i) {
            const uint64_t u = draw();
            std::memcpy(&x[i], &u, 4);
            x[i] = k % 4 == 0 ? float(u >> 40) * 0x1p-22f : x[i];
            y[i] = k % 3 == 0 ? float(int(draw() % 41) - 20) : k % 3 == 1 ? (float(draw() >> 40) - 0x1p23f) * 0x1p-18f : (float(draw() >> 40) - 0x1p23f) * 0x1p-23f;
        }
        ak::storeu(z, ak::pow(ak::loadu(x), ak::loadu(y)));
        for (int i = 0; i < ak::LANES; ++i) see(x[i], y[i], z[i]);
        see(x[0], y[0], ak::pow(x[0], y[0]));
    }
    const float s[] = {0.f, -0.f, 1.f, -1.f, 2.f, -2.f, 3.f, -3.f, 0.5f, -0.5f, 1.5f, -1.5f, INFINITY, -INFINITY, NAN, 1e-40f, -1e-40f, 16777217.f, -16777215.f, 3e38f, -3e38f, 1e-38f};
    for (const float x : s) for (const float y : s) {
        see(x, y, ak::pow(ak::splat(x), ak::splat(y))[ak::LANES - 1]);
        see(x, y, ak::pow(x, y));
    }
    std::printf("(pow's worst is with exponent %.9g)\n", double(other));
    report("pow", "f32", worst.error, worst.at, worst.got, 1.0);
}

static void order() {
    const float s[] = {NAN, 1.f, -1.f, 2.f, INFINITY, -INFINITY, 0.f};
    for (const float a : s) for (const float b : s) {
        const bool nan = a != a || b != b;
        const float most = nan ? NAN : std::fmax(a, b), least = nan ? NAN : std::fmin(a, b);
        if (!same(ak::max(ak::splat(a), ak::splat(b))[1], most) || !same(ak::max(a, b), most)) fail("max(%g, %g)", a, b);
        if (!same(ak::min(ak::splat(a), ak::splat(b))[1], least) || !same(ak::min(a, b), least)) fail("min(%g, %g)", a, b);
        if (!same(ak::max(ak::splat(double(a)), ak::splat(double(b)))[0], double(most))) fail("max f64(%g, %g)", a, b);
        if (!same(ak::min(double(a), double(b)), double(least))) fail("min f64(%g, %g)", a, b);
        if (b != b) continue;
        if (!same(ak::at_least(ak::splat(a), b)[2], most) || !same(ak::at_least(a, b), most)) fail("at_least(%g, %g)", a, b);
        if (!same(ak::at_most(ak::splat(a), b)[2], least) || !same(ak::at_most(double(a), b), double(least))) fail("at_most(%g, %g)", a, b);
    }
    if (!std::signbit(ak::at_least(ak::splat(-0.f), 0.f)[0]) || !std::signbit(ak::at_most(-0.f, 0.f))) fail("at_least(-0, 0)%s", "");
    if (ak::select(ak::splat(1.f) > ak::splat(0.f), ak::splat(3.f), ak::splat(4.f))[0] != 3.f) fail("select");
    if (!std::signbit(ak::splat(-0.f)[0])) fail("splat(-0)%s", "");
    if (ak::fma(ak::splat(2.f), ak::splat(3.f), ak::splat(1.f))[0] != 7.f) fail("fma%s", "");
    if (ak::any(ak::isnan(ak::splat(1.f))) || !ak::any(ak::isnan(ak::splat(double(NAN))))) fail("isnan, any%s", "");
}

template <class F> static void across() {
    typedef typename ak::lane<F>::E E;
    constexpr int N = ak::lane<F>::N;
    for (int k = 0; k < N; ++k) {
        F x{};
        for (int i = 0; i < N; ++i) x[i] = E((i * 7 + k) % N + 1);
        if (ak::hsum(x) != E(N * (N + 1) / 2) || ak::hmax(x) != E(N) || ak::hmin(x) != E(1)) fail("hsum, hmax or hmin of %d lanes", N);
        x[k] = NAN;
        if (!std::isnan(ak::hsum(x)) || !std::isnan(ak::hmax(x)) || !std::isnan(ak::hmin(x))) fail("NaN in lane %d of %d is lost", k, N);
        x[k] = -INFINITY;
        if (ak::hmin(x) != -INFINITY) fail("hmin with -inf%s", "");
    }
}

// The obvious conversions, as slow as they like.
static double half_value(uint16_t h) {
    const int e = (h >> 10) & 31, m = h & 1023;
    const double v = e == 31 ? (m ? NAN : INFINITY) : e ? std::ldexp(1024 + m, e - 25) : std::ldexp(m, -24);
    return h & 0x8000 ? -v : v;
}
static double brain_value(uint16_t h) {
    const uint32_t u = uint32_t(h) << 16;
    float f;
    std::memcpy(&f, &u, 4);
    return f;
}
// The nearest of two neighbouring codes, the even one on a tie, found by their values.
template <class Value> static uint16_t nearest(float x, uint16_t inf, double step_to_inf, Value value) {
    const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
    const double a = std::fabs(double(x));
    if (a >= step_to_inf) return sign | inf;
    uint16_t lo = 0, hi = inf;
    while (hi - lo > 1) {
        const uint16_t mid = uint16_t((lo + hi) / 2);
        if (value(mid) <= a) lo = mid;
        else hi = mid;
    }
    const double below = a - value(lo), above = (hi == inf ? step_to_inf * 2 - value(uint16_t(inf - 1)) : value(hi)) - a;
    return sign | (below < above || (below == above && !(lo & 1)) ? lo : hi);
}

template <class T, class F> static uint16_t through(float x) {
    T out[ak::LANES];
    ak::store_from(out, ak::all_of<F>(x));
    return out[ak::lane<F>::N - 1].bits;
}

template <class T, class Value> static void sixteen_bits(const char* name, uint16_t inf, double step_to_inf, Value value) {
    for (uint32_t code = 0; code < 65536; code += ak::LANES) {
        T in[ak::LANES], out[ak::LANES];
        for (int i = 0; i < ak::LANES; ++i) in[i].bits = uint16_t(code + i);
        const vf x = ak::load_as<vf>(in);
        ak::store_from(out, x);
        for (int i = 0; i < ak::LANES; ++i) {
            const float want = float(value(in[i].bits));
            if (!same(x[i], want) || !same(ak::load_as<float>(in + i), want)) fail("%s %04x loads as %g", name, in[i].bits, double(x[i]));
            if (std::isnan(want) ? !std::isnan(value(out[i].bits)) : out[i].bits != in[i].bits) fail("%s %04x comes back as %04x", name, in[i].bits, out[i].bits);
        }
        for (int j = 0; j < 2; ++j) {
            const vd y = ak::load_as<vd>(in + j * ak::DLANES);
            ak::store_from(out, y);
            for (int i = 0; i < ak::DLANES; ++i) {
                const uint16_t h = in[j * ak::DLANES + i].bits;
                if (!same(double(y[i]), value(h))) fail("%s %04x loads into f64 as %g", name, h, double(y[i]));
                if (y[i] == y[i] && out[i].bits != h) fail("%s %04x comes back from f64 as %04x", name, h, out[i].bits);
            }
        }
    }
    // Around every code: the middle to the next one, and one float to either side of it.
    for (uint32_t code = 0; code < inf; ++code) for (int side = -1; side <= 1; ++side) for (int sign = 0; sign < 2; ++sign) {
        const double next = code + 1 == inf ? step_to_inf * 2 - value(uint16_t(code)) : value(uint16_t(code + 1));
        float x = float((value(uint16_t(code)) + next) / 2);
        if (side) x = std::nextafter(x, side > 0 ? INFINITY : 0.f);
        if (sign) x = -x;
        const uint16_t want = nearest(x, inf, step_to_inf, value);
        if (through<T, vf>(x) != want || through<T, vd>(x) != want || through<T, float>(x) != want) fail("%s of %a is %04x, not %04x", name, double(x), through<T, vf>(x), want);
    }
    for (int k = 0; k < 100000; ++k) {
        const uint32_t u = uint32_t(draw());
        float x;
        std::memcpy(&x, &u, 4);
        const uint16_t got = through<T, vf>(x), one = through<T, float>(x);
        if (x != x) { if (!std::isnan(value(got)) || !std::isnan(value(one))) fail("%s loses NaN %08x", name, u); }
        else if (got != nearest(x, inf, step_to_inf, value) || one != got) fail("%s of %a is %04x", name, double(x), got);
    }
}

// Storage that ends where a page without access begins.
static char* page_end = nullptr;
static void guard_page() {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    char* p = (char*)mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || mprotect(p + page, page, PROT_NONE) != 0) std::abort();
    page_end = p + page;
}

template <class T> static T made(int i) {
    if constexpr (std::is_same_v<T, ak::bf16>) return ak::to_bf16(float(i + 1));
    else if constexpr (std::is_same_v<T, ak::f16>) return ak::to_f16(float(i + 1));
    else if constexpr (std::is_same_v<T, bool>) return i % 3 != 1;
    else return T(i % 2 && std::is_signed_v<T> ? -(i + 1) : i + 1);
}
template <class F, class T> static void memory(const char* name) {
    typedef typename ak::lane<F>::E E;
    constexpr int N = ak::lane<F>::N;
    for (int n = 0; n <= N; ++n) {
        T* p = (T*)(page_end - n * int(sizeof(T)));
        std::memset(page_end - 256, 0x55, 256);
        for (int i = 0; i < n; ++i) p[i] = made<T>(i);
        const F x = ak::load_partial_as<F>(p, n);
        const F whole = n == N ? ak::load_as<F>(p) : x;
        const F strided = ak::gather<F>(p, 1, n), back = ak::gather<F>(p + (n ? n - 1 : 0), -1, n);
        for (int i = 0; i < N; ++i) {
            const E want = i < n ? ak::load_as<E>(p + i) : E(0), reverse = i < n ? ak::load_as<E>(p + n - 1 - i) : E(0);
            if (!same(E(x[i]), want) || !same(E(whole[i]), want)) fail("load_partial_as %s: lane %d of %d is %g, not %g", name, i, n, double(x[i]), double(want));
            if (!same(E(strided[i]), want) || !same(E(back[i]), reverse)) fail("gather %s: lane %d of %d", name, i, n);
        }
        char before[256];
        std::memcpy(before, page_end - 256, 256);
        std::memset(p, 0x33, n * sizeof(T));
        ak::store_partial_from(p, x, n);
        if (std::memcmp(before, page_end - 256, 256) != 0) fail("store_partial_from %s: %d of %d", name, n, N);
        std::memset(p, 0x33, n * sizeof(T));
        ak::scatter(p, 1, x, n);
        if (std::memcmp(before, page_end - 256, 256) != 0) fail("scatter %s: %d of %d", name, n, N);
        if (n == N) {
            std::memset(p, 0x33, n * sizeof(T));
            ak::store_from(p, x);
            if (std::memcmp(before, page_end - 256, 256) != 0) fail("store_from %s", name);
            // More than a register is a register.
            if (ak::load_partial_as<F>(p, N + 5)[N - 1] != x[N - 1]) fail("load_partial_as %s past a register", name);
        } else {  // Fewer than stand there: those behind stay as they are.
            T* q = (T*)(page_end - N * int(sizeof(T)));
            std::memset((void*)q, 0x33, N * sizeof(T));
            ak::store_partial_from(q, x, n);
            for (size_t i = n * sizeof(T); i < N * sizeof(T); ++i) if (((char*)q)[i] != 0x33) fail("store_partial_from %s of %d touches byte %zu", name, n, i);
        }
    }
}
#define MEMORY(T) memory<vf, T>(#T " as f32"), memory<vd, T>(#T " as f64")

template <class F, class T> static void cast(double x, T want, const char* name) {
    T out[ak::LANES];
    ak::store_from(out, ak::all_of<F>(typename ak::lane<F>::E(x)));
    if (out[0] != want || out[ak::lane<F>::N - 1] != want) fail("%s of %g is %g", name, x, double(out[0]));
    ak::store_from(out, typename ak::lane<F>::E(x));
    if (out[0] != want) fail("scalar %s of %g is %g", name, x, double(out[0]));
}
static void casts() {
    cast<vf, int8_t>(-3.9, -3, "int8"), cast<vf, uint8_t>(200.7, 200, "uint8"), cast<vf, uint8_t>(-1, 255, "uint8");
    cast<vf, int32_t>(-2.0e9, -2000000000, "int32"), cast<vf, int64_t>(0x1p40, 1ll << 40, "int64"), cast<vd, int64_t>(-0x1.8p50, -(3ll << 49), "int64");
    cast<vd, int32_t>(2147483647.5, 2147483647, "int32"), cast<vd, float>(0.1, 0.1f, "float"), cast<vf, double>(0.1f, double(0.1f), "double");
    cast<vf, bool>(0.25, true, "bool"), cast<vf, bool>(-0.0, false, "bool"), cast<vf, bool>(NAN, true, "bool"), cast<vd, bool>(1e-300, true, "bool");
    int64_t big[ak::LANES];
    for (int64_t& b : big) b = (1ll << 53) + (1ll << 29) + 1;  // one rounding, not two
    if (ak::load_as<vf>(big)[ak::LANES - 1] != 0x1.000002p53f) fail("int64 is rounded twice%s", "");
    alignas(64) float there[2 * ak::LANES];
    ak::stream(there + ak::LANES, ak::splat(3.f));
    ak::fence();
    if (there[2 * ak::LANES - 1] != 3.f) fail("stream%s", "");
    alignas(64) double wide[ak::DLANES];
    ak::stream(wide, ak::splat(4.));
    ak::fence();
    if (wide[ak::DLANES - 1] != 4.) fail("stream f64%s", "");
    const vf x = ak::narrow(ak::splat(1.), ak::splat(2.));
    if (x[0] != 1 || x[ak::LANES - 1] != 2 || ak::widen_hi(x)[0] != 2 || ak::widen_lo(x)[0] != 1) fail("narrow, widen%s", "");
}

// Coarse: nanoseconds for one register, with the data in the first cache. Printed, never asserted.
template <class F, class Op> static void speed(const char* name, Op op) {
    typedef typename ak::lane<F>::E E;
    alignas(64) static E in[2048], out[2048];
    for (int i = 0; i < 2048; ++i) in[i] = E((i * 37 % 2048) * 0.004 + 0.01);
    double best = 1e30;
    for (int k = 0; k < 40; ++k) {
        const auto start = std::chrono::steady_clock::now();
        for (int r = 0; r < 8; ++r) {
            for (int i = 0; i < 2048; i += ak::lane<F>::N) ak::storeu(out + i, op(ak::loadu(in + i)));
            asm volatile("" ::"r"(out), "r"(in) : "memory");
        }
        const double ns = std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count();
        if (ns < best) best = ns;
    }
    std::printf("ns  %-8s %-4s %6.2f\n", name, sizeof(E) == 4 ? "f32" : "f64", best / (8 * 2048 / ak::lane<F>::N));
}
#define SPEED(F, name) speed<F>(#name, [](F x) { return ak::name(x); })

int main() {
    const char* all = std::getenv("AUTOKERNEL_EXHAUSTIVE");
    exhaustive = all && all[0] == '1';
    std::printf("%d lanes of f32%s\n", ak::LANES, exhaustive ? ", exhaustive" : "");
    guard_page();
    order();
    across<vf>(), across<vd>();
    sixteen_bits<ak::bf16>("bf16", 0x7f80, 0x1.ffp127, brain_value);
    sixteen_bits<ak::f16>("f16", 0x7c00, 65520, half_value);
    MEMORY(float), MEMORY(double), MEMORY(ak::bf16), MEMORY(ak::f16), MEMORY(int8_t), MEMORY(uint8_t), MEMORY(int32_t), MEMORY(int64_t), MEMORY(bool);
    casts();
    accuracy();
    powers();
    SPEED(vf, exp), SPEED(vf, expm1), SPEED(vf, log), SPEED(vf, log1p), SPEED(vf, tanh), SPEED(vf, sigmoid), SPEED(vf, erf), SPEED(vf, sin), SPEED(vf, rsqrt), SPEED(vf, floor);
    speed<vf>("pow", [](vf x) { return ak::pow(x, ak::splat(1.7f)); });
    SPEED(vd, exp), SPEED(vd, log), SPEED(vd, tanh);
    if (failures) std::printf("%d failures\n", failures);
    return failures != 0;
}
