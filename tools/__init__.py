"""Commands around the operators: the benchmark, its results, and the tables made from them."""
