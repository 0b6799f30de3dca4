"""What survives a restart, behind IStore; leadership behind ILeadership."""
