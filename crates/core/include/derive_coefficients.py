"""Derives the polynomial coefficients of autokernel/vec.h (needs mpmath; prints C++ tables).

Each fit is a weighted least-squares fit on Chebyshev points whose weights are sharpened after Lawson until
the error is level (minimax). Coefficients are rounded to the target type one by one from the lowest order
up, and the remaining ones fitted again, so that rounding costs almost nothing.
"""
import struct

from mpmath import cos, erf, erfc, exp, expm1, log, log1p, lu_solve, matrix, mp, mpf, pi, sin, sqrt, tanh

mp.dps = 50


def rounded(value, kind):
    if kind == "f64":
        return mpf(float(value))
    return mpf(struct.unpack("f", struct.pack("f", float(value)))[0])


def lawson(points, target, weight, first, last, rounds=25):
    """Coefficients of t^first..t^last that level |weight * (target - p)|."""
    lawson_weight = [mpf(1)] * len(points)
    size = last - first + 1
    powers = [[t ** (first + k) for k in range(size)] for t in points]
    best, best_error = None, None
    for _ in range(rounds):
        normal, right = matrix(size, size), matrix(size, 1)
        for row, y, w, l in zip(powers, target, weight, lawson_weight):
            scale = l * w * w
            for i in range(size):
                right[i] += scale * row[i] * y
                for j in range(i, size):
                    normal[i, j] += scale * row[i] * row[j]
        for i in range(size):
            for j in range(i):
                normal[i, j] = normal[j, i]
        c = lu_solve(normal, right)
        errors = [abs(w * (y - sum(a * b for a, b in zip(c, row)))) for row, y, w in zip(powers, target, weight)]
        worst = max(errors)
        if best_error is None or worst < best_error:
            best, best_error = list(c), worst
        lawson_weight = [l * (e / worst + mpf("1e-6")) for l, e in zip(lawson_weight, errors)]
        total = sum(lawson_weight) / len(points)
        lawson_weight = [l / total for l in lawson_weight]
    return best, best_error


def fit(name, function, weight, low, high, degree, kind, count=90):
    low, high = mpf(low), mpf(high)
    points = [(low + high) / 2 + (high - low) / 2 * cos(pi * (2 * i + 1) / (2 * count)) for i in range(count)]
    target, weights = [function(t) for t in points], [weight(t) for t in points]
    fixed = []
    for k in range(degree + 1):
        c, _ = lawson(points, target, weights, k, degree)
        fixed.append(rounded(c[0], kind))
        target = [y - fixed[-1] * t**k for y, t in zip(target, points)]
    worst = max(abs(w * y) for w, y in zip(weights, target))
    print(f"// {name}: degree {degree} on [{float(low):.4g}, {float(high):.4g}], weighted error {float(worst):.2g}")
    print("{" + ", ".join(literal(c, kind) for c in fixed) + "},")


def literal(value, kind):
    return repr(float(value)) if kind == "f64" else f"{float(value):.9g}f"


def series(function, t, small):
    """Guards the removable singularity at 0: a mean of two sides has the same limit up to t^2."""
    return function(t) if abs(t) > small else (function(t + small) + function(t - small)) / 2


SMALL = mpf("1e-12")
half_ln2 = log(2) / 2 * mpf("1.003")
exp_tail = lambda t: series(lambda r: (expm1(r) - r) / r**2, t, SMALL)
log_tail = lambda t: series(lambda f: (log1p(f) - f) / f**2, t, SMALL)

fit("exp f32: (e^r - 1 - r) / r^2", exp_tail, lambda r: r**2 / exp(r), -half_ln2, half_ln2, 4, "f32")
fit("expm1 f32: the same, relative to e^r - 1", exp_tail, lambda r: abs(r**2 / expm1(r)), -half_ln2, half_ln2, 5, "f32")
fit("log f32: (log(1 + f) - f) / f^2", log_tail, lambda f: abs(f**2 / log1p(f)), "-0.25", "0.5", 8, "f32")
quarter = (pi / 4 * mpf("1.003")) ** 2
fit("sin f32: (sin r - r) / r^3 in r^2", lambda u: (sin(sqrt(u)) / sqrt(u) - 1) / u, lambda u: u / (sin(sqrt(u)) / sqrt(u)), 0, quarter, 2, "f32")
fit("cos f32: (cos r - 1 + r^2/2) / r^4 in r^2", lambda u: (cos(sqrt(u)) - 1 + u / 2) / u**2, lambda u: u**2 / cos(sqrt(u)), 0, quarter, 2, "f32")
fit("tanh f32: (tanh x - x) / x^3 in x^2", lambda u: (tanh(sqrt(u)) / sqrt(u) - 1) / u, lambda u: u / (tanh(sqrt(u)) / sqrt(u)), "1e-9", mpf("0.551") ** 2, 4, "f32")
for i in range(8):
    c = mpf(i) / 2 + mpf(1) / 4
    if i < 2:
        q = lambda t: erf(c + t) / (c + t)
        fit(f"erf f32: erf(x) / x around {float(c)}", q, lambda t: 1 / q(t), "-0.25", "0.25", 6, "f32", 40)
    else:
        fit(f"erf f32: erf(x) - 1 around {float(c)}", lambda t: -erfc(c + t), lambda t: mpf(1), "-0.25", "0.25", 6, "f32", 40)
fit("exp f64", exp_tail, lambda r: r**2 / exp(r), -half_ln2, half_ln2, 9, "f64")
fit("expm1 f64", exp_tail, lambda r: abs(r**2 / expm1(r)), -half_ln2, half_ln2, 11, "f64")
atanh_tail = lambda z: (log((1 + sqrt(z)) / (1 - sqrt(z))) / sqrt(z) - 2) / z
fit("log f64: (log((1+s)/(1-s)) - 2s) / s^3 in s^2", atanh_tail, lambda z: z, "1e-9", mpf(1) / 25 * mpf("1.01"), 7, "f64")
