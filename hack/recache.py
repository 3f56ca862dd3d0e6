"""Have the libraries of this environment, which pip has just written, cached in small pages.

What is cached in large pieces comes into memory in such: agents would take more for their code than
their floor reserves. `shoal run` and agents see to that themselves, but not while another process
has the libraries mapped, and tests run side by side.
"""

import site
from pathlib import Path

from shoal_protocol.page_cache import cache_libraries_in_small_pages

for folder in site.getsitepackages():
    cache_libraries_in_small_pages(Path(folder).rglob("*.so*"))
