//! The search agent: regions become loops, loops become kernels.
