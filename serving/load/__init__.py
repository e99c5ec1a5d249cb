"""The load client: what is sent (`workload`), how (`client`, `drive`), and what it means (`metrics`, `bench`)."""
