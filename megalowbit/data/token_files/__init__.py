"""Files of token ids: the cache of tokenised corpora, and Megatron's `.bin` and `.idx`."""
