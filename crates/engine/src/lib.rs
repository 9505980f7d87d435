//! The loop: capture, tasks, agents, judge, assemble, gate.
