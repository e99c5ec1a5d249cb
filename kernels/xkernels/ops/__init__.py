"""The operators: each a public function, a `_reference` twin in plain torch, and private kernels in `_details`."""
