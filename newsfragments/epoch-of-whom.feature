A server that meets agents of another leader's epoch says whose, and what that means if nobody else leads.
