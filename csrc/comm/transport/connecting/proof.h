/* A proof of knowing the job's secret without sending it: HMAC-SHA256 (RFC 2104, FIPS
 * 180-4).  For handshakes: a few hundred bytes, once per connection. */
#ifndef SMP_COMM_TRANSPORT_CONNECTING_PROOF_H
#define SMP_COMM_TRANSPORT_CONNECTING_PROOF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SMP_PROOF_BYTES 32

/* `secret` ends with NUL; at most 64 bytes count. */
void smp_proof(const char *secret, const void *text, size_t n,
               uint8_t out[SMP_PROOF_BYTES]);

/* Takes the same time wherever they differ. */
bool smp_proof_equal(const uint8_t a[SMP_PROOF_BYTES],
                     const uint8_t b[SMP_PROOF_BYTES]);

#endif
