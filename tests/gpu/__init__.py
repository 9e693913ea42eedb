"""What only a GPU can show. Run with the contract's tests by ``make test-gpu``."""
