"""What several tests share."""
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_data():
    "The folder of real data beside the repository; tests that need it are skipped where it is absent"
    folder = Path(__file__).resolve().parents[2]/"shared"/"data"
    if not folder.is_dir(): pytest.skip(f"no real data at {folder}")
    return folder
