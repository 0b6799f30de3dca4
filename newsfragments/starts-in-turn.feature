Engines that share a device are started one after the other, so that each finds the memory that it was promised.
