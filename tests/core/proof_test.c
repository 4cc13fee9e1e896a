/* Spec: csrc/comm/transport/connecting/proof.h; the cases of RFC 4231 and one at each
 * edge of a block.
 */
#define _GNU_SOURCE
#include "comm/transport/connecting/proof.h"

#include "check.h"

static void
as_hex(const uint8_t proof[SMP_PROOF_BYTES], char *hex)
{
    for (size_t i = 0; i < SMP_PROOF_BYTES; i++) {
        snprintf(hex + 2 * i, 3, "%02x", proof[i]);
    }
}

TEST(the_proofs_are_those_of_rfc_4231)
{
    static const struct {
        const char *secret;
        const char *text;
        const char *proof;
    } cases[] = {
        {"Jefe", "what do ya want for nothing?",
         "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
        {"\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b\x0b"
         "\x0b",
         "Hi There",
         "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
    };

    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        uint8_t proof[SMP_PROOF_BYTES];
        char    hex[2 * SMP_PROOF_BYTES + 1];

        smp_proof(cases[i].secret, cases[i].text, strlen(cases[i].text), proof);
        as_hex(proof, hex);
        CHECK_TEXT(hex, cases[i].proof);
    }
}

/* Texts of "a" whose padding just fits and just does not; expected from OpenSSL. */
TEST(every_padding_is_right)
{
    static const struct {
        size_t      length;
        const char *proof;
    } cases[] = {
        {0, "f9e66e179b6747ae54108f82f8ade8b3c25d76fd30afde6c395822c530196169"},
        {55, "128b6df4c3068d0e9df20c6c24fc4e03d3d610860b06e09c4b46fffc4ca7387d"},
        {56, "06a87302f923e199d95fca282d54efbb9960d77ba79be1ebc59d1421ca58a71f"},
        {63, "1cdaef5b057d9e7bc18a83afd4620c0849051f18507cf850a4b5b29703e1d3c7"},
        {64, "1785e99f81ba5d48603d542c0fd9e7ab981063b695ca3aca8d8cf015d593ac2a"},
        {119, "5030ac05026aeb8fb2761530682f0ca19fa4fe80e34a8ca205208e508283f31f"},
        {200, "31f37d12b1ac6b929c714096be1fc84246ccb3bb8cb21389652e58c76064f69f"},
    };

    for (size_t i = 0; i < COUNT_OF(cases); i++) {
        uint8_t proof[SMP_PROOF_BYTES];
        char    text[256];
        char    hex[2 * SMP_PROOF_BYTES + 1];

        memset(text, 'a', sizeof(text));
        smp_proof("secret", text, cases[i].length, proof);
        as_hex(proof, hex);
        CHECK_TEXT(hex, cases[i].proof);
    }
}

TEST(proofs_are_equal_only_in_every_byte)
{
    uint8_t a[SMP_PROOF_BYTES] = {1, 2, 3};
    uint8_t b[SMP_PROOF_BYTES] = {1, 2, 3};

    CHECK(smp_proof_equal(a, b));
    for (size_t i = 0; i < SMP_PROOF_BYTES; i++) {
        b[i] ^= 0x80;
        CHECK(!smp_proof_equal(a, b));
        b[i] ^= 0x80;
    }
}

RUN_TESTS
