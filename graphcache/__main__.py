"""`python -m graphcache` is the console script."""

import sys

from graphcache.cli import main

sys.exit(main())
