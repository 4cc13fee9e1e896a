/* Stores past the caches: SSE2's, on every x86-64. */
#include "comm/collective/kernels/copy.h"

#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#    include <emmintrin.h>
#endif

#define LINE ((size_t)64)

#if defined(__SSE2__)
void
smp_copy_uncached(void *to, const void *from, size_t bytes)
{
    uint8_t       *out = to;
    const uint8_t *in = from;
    size_t         head = (LINE - (uintptr_t)out % LINE) % LINE;

    head = head < bytes ? head : bytes;
    memcpy(out, in, head);
    out += head;
    in += head;
    bytes -= head;
    for (; bytes >= LINE; bytes -= LINE, out += LINE, in += LINE) {
        const __m128i *source = (const __m128i *)(const void *)in;
        __m128i       *target = (__m128i *)(void *)out;
        __m128i        a = _mm_loadu_si128(source);
        __m128i        b = _mm_loadu_si128(source + 1);
        __m128i        c = _mm_loadu_si128(source + 2);
        __m128i        d = _mm_loadu_si128(source + 3);

        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    memcpy(out, in, bytes);
    _mm_sfence(); /* these stores have an order of their own */
}
#else
void
smp_copy_uncached(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}
#endif
