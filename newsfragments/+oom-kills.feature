An engine one of whose processes the kernel killed for want of memory is told as that, by its cgroup's own count, whatever its exit status was.
