/* What a thread does between two looks at memory for which it keeps its core. */
#ifndef SMP_COMMON_SPIN_H
#define SMP_COMMON_SPIN_H

/* Tells the processor that it spins. */
static inline void
smp_spin_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
