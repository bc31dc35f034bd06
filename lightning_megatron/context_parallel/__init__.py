"""Context parallelism: sequences cut over ranks, attention that reaches over the cuts, and plans of who computes what."""
