/* Spinning: a thread keeps its core between two looks at memory. */
#ifndef SMP_COMMON_SPIN_H
#define SMP_COMMON_SPIN_H

/* Tells the processor of the spinning. */
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
