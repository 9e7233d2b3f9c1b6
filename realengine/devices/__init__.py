"""The hardware that steps run on: a GPU or the CPU, its memory and its speed."""
