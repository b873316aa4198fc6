"""Writes scikit-learn's digits as the file that `images --data digits:FILE` reads: python digits.py digits.csv"""

import gzip
import pathlib
import sys

import sklearn

packed = pathlib.Path(sklearn.__file__).parent / "datasets" / "data" / "digits.csv.gz"
pathlib.Path(sys.argv[1]).write_bytes(gzip.decompress(packed.read_bytes()))
