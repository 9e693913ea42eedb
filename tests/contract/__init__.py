"""The contract, sentence by sentence, run on every backend that this machine can run."""
