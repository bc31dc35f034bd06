"""Shared test set-up: one thread for each process, and everything imported before ranks are forked."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import lightning  # noqa: F401  (imported once here, so that forked ranks do not pay for it)
import torch

torch.set_num_threads(1)
