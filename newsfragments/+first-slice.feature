The first slice: two daemons, one link, real engines, one address.
