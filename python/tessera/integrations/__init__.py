"""Connects Tessera to the training loops of other libraries. Each module here needs its library; `import tessera` needs
none."""
