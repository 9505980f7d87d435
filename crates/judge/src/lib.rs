//! Is a kernel correct, is it faster. Knows no agent.
