"""What each instruction does, one file a class of instructions. Each file's BUILDERS maps mnemonics to
builders."""
