"""Why a step is not one graph, not one CUDA graph, or not fast: see `report` for what is found out."""
