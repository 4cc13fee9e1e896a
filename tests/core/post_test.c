/* Messages that come before their channel is open.  Spec: csrc/comm/post.h. */
#include "comm/post.h"

#include <string.h>

#include "check.h"

static smp_status
put(smp_post *post, uint64_t address, uint64_t nonce)
{
    smp_post_head head = {.mark = SMP_POST_MARK, .address = address, .nonce = nonce};
    smp_message  *message;
    smp_status    status = smp_message_create(0, sizeof(head), 0, &message);

    if (status == SMP_OK) {
        memcpy(message->bytes, &head, sizeof(head));
        smp_post_put(post, message);
    }
    return status;
}

TEST(messages_wait_for_their_channel_while_others_open)
{
    smp_channel channels[3] = {{.address = 1, .nonce = 10},
                               {.address = 2, .nonce = 20},
                               {.address = 3, .nonce = 30}};
    smp_post    post;

    smp_post_init(&post);
    for (int i = 0; i < 2; i++) {
        CHECK_STATUS(put(&post, 3, 0), SMP_OK);
        CHECK_STATUS(put(&post, 2, 0), SMP_OK);
    }
    CHECK_STATUS(put(&post, 2, 21), SMP_OK); /* of a channel that is closed: dropped */
    for (int i = 0; i < 3; i++) {
        smp_channel_open(&post, &channels[i]);
        CHECK(atomic_load(&channels[i].count) == (i == 0 ? 0 : 2));
    }
    CHECK_STATUS(put(&post, 1, 10), SMP_OK);
    CHECK(atomic_load(&channels[0].count) == 1);
    for (int i = 0; i < 3; i++) {
        smp_channel_close(&post, &channels[i]);
    }
    smp_post_fini(&post);
    return 0;
}

TEST(an_open_channel_that_is_narrowed_leaves_the_rest_to_the_next)
{
    smp_channel first = {.address = 1, .nonce = 10};
    smp_channel next = {.address = 1, .nonce = 11};
    smp_post    post;

    smp_post_init(&post);
    smp_channel_open(&post, &first);
    smp_channel_narrow(&post, &first);
    CHECK_STATUS(put(&post, 1, 0), SMP_OK);
    CHECK_STATUS(put(&post, 1, 10), SMP_OK);
    CHECK(atomic_load(&first.count) == 1);
    smp_channel_open(&post, &next);
    CHECK(atomic_load(&next.count) == 1);
    smp_channel_close(&post, &first);
    smp_channel_close(&post, &next);
    smp_post_fini(&post);
    return 0;
}

int
main(int argc, char **argv)
{
    static const smp_test tests[] = {
        {"wait", messages_wait_for_their_channel_while_others_open},
        {"narrow", an_open_channel_that_is_narrowed_leaves_the_rest_to_the_next},
    };

    return run_tests(tests, sizeof(tests) / sizeof(tests[0]), argc, argv);
}
