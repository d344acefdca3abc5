namespace tandem::layout {}  // namespace tandem::layout
