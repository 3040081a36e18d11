"""SiDA (Du et al. 2023): a hash function that names the experts of every layer before the first has run."""
