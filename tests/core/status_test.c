/* Spec: csrc/common/status.h. */
#include "check.h"

TEST(a_status_has_the_name_of_its_enum_and_a_text)
{
    CHECK(strcmp(smp_status_name(SMP_ERR_PEER_LOST), "SMP_ERR_PEER_LOST") == 0);
    CHECK(strcmp(smp_status_text(SMP_OK), "ok") == 0);
    return 0;
}

int
main(int argc, char **argv)
{
    static const smp_test tests[] = {
        {"a_status_has_the_name_of_its_enum_and_a_text",
         a_status_has_the_name_of_its_enum_and_a_text},
    };
    return run_tests(tests, sizeof(tests) / sizeof(tests[0]), argc, argv);
}
