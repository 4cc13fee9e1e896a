/* Channels, and messages that come before theirs is open.  Spec:
 * csrc/comm/messaging/post.h. */
#include "comm/messaging/post.h"

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
        CHECK_OK(put(&post, 3, 0));
        CHECK_OK(put(&post, 2, 0));
    }
    CHECK_OK(put(&post, 2, 21)); /* of a channel that is closed: dropped */
    for (int i = 0; i < 3; i++) {
        smp_channel_open(&post, &channels[i]);
        CHECK(atomic_load(&channels[i].count) == (i == 0 ? 0 : 2));
    }
    CHECK_OK(put(&post, 1, 10));
    CHECK(atomic_load(&channels[0].count) == 1);
    CHECK_OK(put(&post, 2, 21)); /* nor does the open one take it */
    CHECK(atomic_load(&channels[1].count) == 2);
    for (int i = 0; i < 3; i++) {
        smp_channel_close(&post, &channels[i]);
    }
    smp_post_fini(&post);
}

TEST(an_open_channel_that_is_narrowed_leaves_the_rest_to_the_next)
{
    smp_channel first = {.address = 1, .nonce = 10};
    smp_channel next = {.address = 1, .nonce = 11};
    smp_post    post;

    smp_post_init(&post);
    smp_channel_open(&post, &first);
    smp_channel_narrow(&post, &first);
    CHECK_OK(put(&post, 1, 0));
    CHECK_OK(put(&post, 1, 10));
    CHECK(atomic_load(&first.count) == 1);
    smp_channel_open(&post, &next);
    CHECK(atomic_load(&next.count) == 1);
    smp_channel_close(&post, &first);
    smp_channel_close(&post, &next);
    smp_post_fini(&post);
}

TEST(what_comes_rings_the_doorbell_of_its_channel)
{
    smp_channel  channels[2] = {{.address = 1, .nonce = 10},
                                {.address = 2, .nonce = 20}};
    smp_doorbell bells[2] = {0};
    smp_post     post;

    smp_post_init(&post);
    for (int i = 0; i < 2; i++) {
        smp_channel_open(&post, &channels[i]);
        smp_channel_set_doorbell(&post, &channels[i], &bells[i]);
        smp_doorbell_lie_down(&bells[i]);
    }
    CHECK_OK(put(&post, 2, 0));
    CHECK(atomic_load(&bells[0].asleep) != 0 && atomic_load(&bells[1].asleep) == 0);
    smp_channel_set_doorbell(&post, &channels[0], NULL);
    CHECK_OK(put(&post, 1, 10));
    CHECK(atomic_load(&bells[0].asleep) != 0);
    for (int i = 0; i < 2; i++) {
        smp_channel_close(&post, &channels[i]);
    }
    smp_post_fini(&post);
}

typedef struct {
    char text[64]; /* the channels' names and the messages' sources */
    int  until;    /* the source of the last to be shown; -1: there is none */
} shown;

static bool
look_at(void *arg, const char *name, const smp_message *message)
{
    shown *s = arg;
    size_t n = strlen(s->text);

    snprintf(s->text + n, sizeof(s->text) - n, "%s%d ", name, message->source);
    return message->source == s->until;
}

/* The newest channel's come first, of each what its owner keeps. */
TEST(what_has_come_elsewhere_is_shown_with_the_names_of_channels)
{
    smp_channel  channels[3] = {{.address = 1, .nonce = 10, .name = "one"},
                                {.address = 2, .nonce = 20, .name = "two"},
                                {.address = 3, .nonce = 30}};
    shown        all = {.until = -1};
    shown        some = {.until = 7};
    smp_message *kept;
    smp_post     post;

    smp_post_init(&post);
    for (int i = 0; i < 3; i++) {
        smp_channel_open(&post, &channels[i]);
        for (int j = 0; j < 2; j++) {
            CHECK_OK(put(&post, channels[i].address, 0));
            channels[i].messages.last->source = 3 * i + j;
        }
    }
    kept = smp_channel_get(&post, &channels[2]);
    CHECK(kept->source == 6 && atomic_load(&channels[2].count) == 1);
    kept->source = 8;
    channels[2].kept = kept;
    smp_channel_set_name(&post, &channels[0], "first");
    CHECK(!smp_post_elsewhere(&post, &channels[1], look_at, &all));
    CHECK_TEXT(all.text, "8 7 first0 first1 ");
    CHECK(smp_post_elsewhere(&post, &channels[0], look_at, &some));
    CHECK_TEXT(some.text, "8 7 ");
    smp_message_free(kept);
    for (int i = 0; i < 3; i++) {
        smp_channel_close(&post, &channels[i]);
    }
    smp_post_fini(&post);
}

/* It turned out to be for the next one. */
TEST(what_is_given_back_goes_to_the_next_channel_with_the_address)
{
    smp_channel  first = {.address = 1, .nonce = 10};
    smp_channel  next = {.address = 1, .nonce = 11};
    smp_message *message;
    smp_post     post;

    smp_post_init(&post);
    smp_channel_open(&post, &first);
    CHECK(smp_channel_get(&post, &first) == NULL);
    CHECK_OK(put(&post, 1, 0));
    message = smp_channel_get(&post, &first);
    CHECK(message != NULL && smp_post_is(message));
    smp_post_keep(&post, message);
    CHECK(smp_channel_get(&post, &first) == NULL);
    smp_channel_close(&post, &first);
    smp_channel_open(&post, &next);
    CHECK(smp_channel_get(&post, &next) == message);
    message->bytes[0] ^= 1; /* without the mark it is for nobody here */
    CHECK(!smp_post_is(message));
    smp_message_free(message);
    smp_channel_close(&post, &next);
    smp_post_fini(&post);
}

RUN_TESTS
