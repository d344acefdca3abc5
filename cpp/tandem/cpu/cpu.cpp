namespace tandem::cpu {}  // namespace tandem::cpu
