//! The fixed list of what a kernel may import.

/// Memory, without allocation.
const MEMORY: [&str; 4] = ["memcpy", "memmove", "memset", "memcmp"];

/// OpenMP as parallel regions, work-sharing loops, sections, single, barriers and atomics use it.
/// No tasks, which may outlive a construct; no critical sections, which need writable data.
const OPENMP: [&str; 2] = ["omp_get_thread_num", "omp_get_num_threads"];
const GOMP: [&str; 10] = [
    "parallel",
    "barrier",
    "single_start",
    "atomic_start",
    "atomic_end",
    "sections_start",
    "sections_next",
    "sections_end",
    "sections_end_nowait",
    "parallel_sections",
];
/// `GOMP_loop_…` and `GOMP_parallel_loop_…`, all schedules: they differ by version of the compiler.
const GOMP_LOOPS: [&str; 3] = ["loop_", "parallel_loop_", "loop_ull_"];

/// Functions of libm, each also with the suffix `f`. All are pure but for the error flag.
const MATHS: [&str; 57] = [
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "cbrt",
    "ceil",
    "copysign",
    "cos",
    "cosh",
    "erf",
    "erfc",
    "exp",
    "exp10",
    "exp2",
    "expm1",
    "fabs",
    "fdim",
    "floor",
    "fma",
    "fmax",
    "fmin",
    "fmod",
    "frexp",
    "hypot",
    "ilogb",
    "ldexp",
    "llrint",
    "llround",
    "log",
    "log10",
    "log1p",
    "log2",
    "logb",
    "lrint",
    "lround",
    "modf",
    "nearbyint",
    "nextafter",
    "pow",
    "remainder",
    "remquo",
    "rint",
    "round",
    "roundeven",
    "scalbln",
    "scalbn",
    "sin",
    "sincos",
    "sinh",
    "sqrt",
    "tan",
    "tanh",
    "tgamma",
    "trunc",
];

/// Whether a kernel may import this symbol.
pub(super) fn allowed(name: &str) -> bool {
    if let Some(rest) = name.strip_prefix("GOMP_") {
        // `GOMP_parallel_loop_…_start` starts a team and comes back at once: it would outlive its call.
        if rest.starts_with("parallel_loop_") && rest.ends_with("_start") {
            return false;
        }
        return GOMP.contains(&rest) || GOMP_LOOPS.iter().any(|prefix| rest.starts_with(prefix));
    }
    let single = name.strip_suffix('f').unwrap_or(name);
    MEMORY.contains(&name) || OPENMP.contains(&name) || MATHS.contains(&name) || MATHS.contains(&single)
}

#[cfg(test)]
mod tests {
    use super::allowed;

    #[test]
    fn the_list_is_what_it_says() {
        for name in
            ["expf", "exp", "erf", "erff", "memcpy", "GOMP_parallel", "GOMP_loop_nonmonotonic_dynamic_start"]
        {
            assert!(allowed(name), "{name}");
        }
        for name in ["GOMP_parallel_loop_dynamic_start", "GOMP_parallel_loop_runtime_start"] {
            assert!(!allowed(name), "{name} leaves a team behind");
        }
        for name in
            ["printf", "dlopen", "system", "malloc", "GOMP_task", "GOMP_target", "expff", "_ZGVdN8v_expf", ""]
        {
            assert!(!allowed(name), "{name}");
        }
    }
}
