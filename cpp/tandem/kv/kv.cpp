namespace tandem::kv {}  // namespace tandem::kv
