namespace tandem::sched {}  // namespace tandem::sched
