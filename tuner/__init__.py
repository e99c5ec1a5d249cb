"""Search for kernel configurations: space, compile, measure, verify, emit."""
