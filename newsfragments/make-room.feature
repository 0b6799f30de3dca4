A wanted model that fits nowhere makes idle models with `min: 0` give way, least recently used first, only as many as are needed.
