"""Training text: corpora, tokenisation, packing into fixed-length samples, a resumable sharded loader."""
