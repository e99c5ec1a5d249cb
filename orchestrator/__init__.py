"""The control plane: matrix, plan, pools, cells, compare, gate."""
