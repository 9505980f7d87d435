//! The `autokernel` program.

fn main() {}
